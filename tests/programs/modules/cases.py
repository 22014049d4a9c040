"""Module calls of one kind, selected on the command line. trail.py writes the expected result."""

import sys
import time

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
import trail

WIDTH = 256


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Attention(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm  # shared with the block
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out(scores @ v)


class Block(nn.Module):
    def __init__(self, cubes):
        super().__init__()
        self.cubes = cubes
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(self.norm)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(x)
        x = x + self.mlp(self.norm(x))
        return Cube.apply(x) * 0.5 if self.cubes else x * 0.5


class Model(nn.Module):
    """Calls its blocks in a loop from one line, so all have the same stack."""

    def __init__(self, depth=4, cubes=True):
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(cubes) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens):
        x = self.embed(tokens) + torch.ones(tokens.shape[-1], WIDTH, device="cuda")
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, make, steps=3, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(steps):
        loss = (call or model)(make()).float().mean()
        trail.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def tokens():
    return torch.randint(0, 100, (8, 32), device="cuda")


def features():
    return torch.randn(64, WIDTH, device="cuda")


def transformer():
    model = Model().cuda()
    trail.start(model=model)
    train(model, tokens)


def convolutions():
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    model = nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    trail.start(model=model)
    train(model, lambda: torch.randn(4, 3, 32, 32, device="cuda"))


def recurrent():
    """A module that calls itself."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, deeper=3):
            x = self.fc(x).relu() + 1
            return self(x, deeper - 1) * 2 if deeper else x

    model = Twice().cuda()
    trail.start(model=model)
    train(model, features)


def evaluation():
    model = Model(2).cuda().eval()
    trail.start(model=model)
    with torch.no_grad():
        for _ in range(3):
            model(tokens())


def odd():
    """Unusual uses of `self`, of modules, and of the names that PyTorch uses."""
    class Rebinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            fc, self = self.fc, None
            return fc(x) + torch.ones_like(x)

    class Raises(nn.Module):
        def forward(self, x):
            x = x * 2
            raise ValueError(x.shape)

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Raises()

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                return x * 3

    class Deletes(nn.Module):
        """Deletes the last reference to the module whose call is running."""
        def __init__(self):
            super().__init__()
            self.held = [Temporary(self)]

        def forward(self, x):
            return self.held[0](x) + torch.ones_like(x)

    class Temporary(nn.Module):
        known_as = "temporary"

        def __init__(self, owner):
            super().__init__()
            object.__setattr__(self, "owner", owner)

        def forward(self, x):
            self.owner.held[0] = nn.Identity()
            return x * 5

    class Generates(nn.Module):
        """A generator that belongs to one module and is resumed in the call of another."""
        def __init__(self):
            super().__init__()
            self.first, self.second = Resumes(), Resumes()

        def forward(self, x):
            def pieces(x):
                while True:
                    x = x * 2 + 1
                    yield x
            made = pieces(x)
            self.first.made = self.second.made = made
            return self.first(x) + self.second(x) + next(made)

    class Resumes(nn.Module):
        def forward(self, x):
            return next(self.made) * x

    class NotAModule:
        """Has the method names of a module and is none."""
        def _wrapped_call_impl(self, x):
            return self._call_impl(x)

        def _call_impl(self, x):
            return x * 7 + 1

        __call__ = _wrapped_call_impl

    class Mixin:
        pass

    class Mixed(Mixin, nn.Linear):
        """`Module` is not among its first bases."""

    class Overrides(nn.Module):
        """Has its own `__call__`, which computes before and after PyTorch's."""
        def __call__(self, x):
            x = x + torch.ones_like(x)
            return super().__call__(x) * 2

        def forward(self, x):
            return x * 3

    class Bypassed(nn.Module):
        """Is never called; only its `forward` is."""
        def forward(self, x):
            return x * 4

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.rebinds, self.catches, self.deletes = Rebinds(), Catches(), Deletes()
            self.generates, self.overrides, self.bypassed = Generates(), Overrides(), Bypassed()
            self.mixed, self.no_module = Mixed(WIDTH, WIDTH), NotAModule()

        def forward(self, x):
            for module in (self.rebinds, self.catches, self.deletes, self.generates, self.mixed, self.no_module, self.overrides):
                x = module(x)
            # The call itself has the last reference.
            x = Plus().__call__(x)
            return self.bypassed.forward(x)

    class Plus(nn.Module):
        known_as = "plus"

        def forward(self, x):
            return x + torch.ones_like(x)

    model = Odd().cuda()
    trail.start(model=model)
    for _ in range(3):
        train(model, features, 1)
        model.deletes.held = [Temporary(model.deletes)]


def classes():
    """Creates new modules all the time, most at addresses where modules of other classes were before."""
    kinds = [
        type(f"Kind{n}", (nn.Module,), {"forward": lambda self, x: x * 2 + 1, "known_as": f"kind{n}"}) for n in range(7)
    ]
    trail.start()
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    for n in range(100):
        y = kinds[n % 7]()(x)
        for m in range(3):
            y = [nn.ReLU, nn.GELU, nn.Tanh][(n + m) % 3]()(y)
        trail.backward(y.sum())
        x.grad = None


def saved_checkpoint():
    """The blocks' second forward runs inside nodes of the backward pass."""
    model = Model(3, cubes=False).cuda()

    def call(tokens):
        x = model.embed(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    trail.start(model=model)
    train(model, tokens, call=call)


globals()[sys.argv[1]]()
trail.finish()
# The engine's thread frees the Python objects of a backward pass after it ends. If Python has ended by then, PyTorch
# 2.15 crashes, with and without memtrace.
time.sleep(0.2)
