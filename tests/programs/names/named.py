"""Programs that write their tensors' names, which memtrace must find by itself.

named.py CASE... writes one line of JSON after each step to the file MEMTRACE_TEST_NAMES: kind, name, address, device
and shape of every tensor. PyTorch itself gives them: named_parameters(), named_buffers(), .grad, optimizer.state; and
the modules by named_modules(). Kernels do not run over the simulated CUDA, so no program here reads a result.
"""

import contextvars
import gc
import json
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

PATH = os.environ.get("MEMTRACE_TEST_NAMES")


def plain(tensor):
    """The tensor that owns the memory: for a DTensor its local tensor."""
    return getattr(tensor, "_local_tensor", tensor)


class Oracle:
    def __init__(self, rank=None):
        self.file = open(PATH if rank is None else f"{PATH}.{rank}", "a") if PATH else None

    def note(self, models, optimizers=(), gradients=True, called=()):
        """Writes all names at this time. `called` has the prefix of each model's names."""
        if not self.file:
            return
        rows, names = [], {}

        def row(kind, name, tensor):
            tensor = plain(tensor)
            if tensor is None or not tensor.is_cuda:
                return
            storage = tensor.untyped_storage()
            if storage.data_ptr():
                shape = f"{str(tensor.dtype).split('.')[-1]}[{', '.join(map(str, tensor.shape))}]"
                rows.append([kind, name, storage.data_ptr(), shape])

        modules = []
        for at, model in enumerate(models):
            within = called[at] if called else ""
            for name, parameter in model.named_parameters(prefix=within, remove_duplicate=False):
                names.setdefault(id(parameter), name)
                row("parameter", name, parameter)
                if gradients and parameter.grad is not None:
                    row("gradient", name + ".grad", parameter.grad)
            for name, buffer in model.named_buffers(prefix=within, remove_duplicate=False):
                row("buffer", name, buffer)
            modules += [[id(module), type(module).__name__, name] for name, module in model.named_modules(prefix=within)]
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        name = f"{type(optimizer).__name__}.{key} of {names[id(parameter)]}"
                        row("optimizer_state", name, value)
        print(json.dumps({"tensors": rows, "modules": modules}), file=self.file, flush=True)


def train(model, batch, models=None, optimizer=None, steps=3, oracle=None):
    oracle = oracle or Oracle()
    models = models or [model]
    for _ in range(steps):
        out = model(batch())
        (out if out.dim() == 0 else out.float().sum()).backward()
        oracle.note(models, [optimizer], gradients=True)
        optimizer.step()
        oracle.note(models, [optimizer], gradients=True)
        optimizer.zero_grad()
    model(batch()).sum()
    oracle.note(models, [optimizer], gradients=False)


def mlp():
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)).cuda()


def adam():
    model = mlp()
    train(model, lambda: torch.empty(64, 512, device="cuda"), optimizer=torch.optim.Adam(model.parameters()))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.register_buffer("scale", torch.ones(width, device="cuda"), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)) * self.scale[:, None, None])


class ResNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.layer2 = nn.ModuleList([Residual(width) for _ in range(2)])
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        x = self.layer1(self.stem(x))
        for block in self.layer2:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def resnet():
    model = ResNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, lambda: torch.empty(4, 3, 32, 32, device="cuda"), optimizer=optimizer)


class Tied(nn.Module):
    """The embedding's weight is the head's weight; one block is used twice; two parameters are views of one storage."""

    def __init__(self, width=64, words=500):
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.block = nn.Linear(width, width)
        self.again = self.block
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight
        flat = torch.empty(2 * width, device="cuda")
        self.first = nn.Parameter(flat[:width])
        self.second = nn.Parameter(flat[width:])

    def forward(self, x):
        return self.head(self.again(self.block(self.wte(x))) * self.first + self.second)


def tied():
    model = Tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, lambda: torch.zeros(4, 16, dtype=torch.long, device="cuda"), optimizer=optimizer)


def frozen():
    model = mlp()
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], momentum=0.9)
    train(model, lambda: torch.empty(64, 512, device="cuda"), optimizer=optimizer)


def compiled():
    model = mlp()
    whole = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(whole.parameters())
    train(whole, lambda: torch.empty(64, 512, device="cuda"), models=[whole], optimizer=optimizer)


def adversaries(first, second, called):
    """Two models and two optimizers that take turns within each step."""
    optimizers = [torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.5)]
    oracle = Oracle()
    for _ in range(3):
        second(first(torch.empty(64, 512, device="cuda"))).sum().backward()
        oracle.note([first, second], optimizers, called=called)
        for optimizer in optimizers:
            optimizer.step()
        oracle.note([first, second], optimizers, called=called)
        for optimizer in optimizers:
            optimizer.zero_grad()


def critic():
    return nn.Sequential(nn.Linear(10, 77), nn.ReLU(), nn.Linear(77, 1)).cuda()


def two():
    """Equal names in both models, and nothing that distinguishes them."""
    adversaries(mlp(), critic(), ["Sequential#1", "Sequential#2"])


def variables():
    """Equal names in both models of one class, which are in global variables."""
    globals().update(generator=mlp(), discriminator=critic())
    adversaries(globals()["generator"], globals()["discriminator"], ["generator", "discriminator"])


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def classes():
    """Equal names in two models of different classes. A third model has other names and keeps them."""
    third = nn.ModuleDict({"scale": nn.Linear(8, 8)}).cuda()
    adversaries(Generator(*mlp()), Discriminator(*critic()), ["Generator", "Discriminator"])
    Oracle().note([third])


def second_model():
    """A second model appears when the first one already has names: the first one keeps them."""
    first = mlp()
    train(first, lambda: torch.empty(64, 512, device="cuda"), optimizer=torch.optim.Adam(first.parameters()))
    second = Discriminator(*critic())
    optimizer = torch.optim.Adam(second.parameters())
    oracle = Oracle()
    for _ in range(12):
        second(torch.empty(64, 10, device="cuda")).sum().backward()
        optimizer.step()
        oracle.note([first, second], [optimizer], gradients=False, called=["", "Discriminator"])
        optimizer.zero_grad()


def folds():
    """Cross-validation: one model stays, and beside it models with equal names come and go."""
    kept, oracle = Generator(*mlp()), Oracle()
    for _ in range(4):
        model = Discriminator(*critic())
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(7):
            model(kept(torch.empty(64, 512, device="cuda"))).sum().backward()
            optimizer.step()
            oracle.note([kept, model], [optimizer], gradients=False, called=["Generator", "Discriminator"])
            optimizer.zero_grad()
        del model, optimizer


def resumed():
    """Another optimizer, at another line, continues the training of the same model."""
    model = mlp()
    train(model, lambda: torch.empty(64, 512, device="cuda"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.Adam(model.parameters())
    oracle = Oracle()
    for _ in range(12):
        model(torch.empty(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        oracle.note([model], [optimizer], gradients=False)
        optimizer.zero_grad()


def served():
    """No training: a second model is loaded after the first has been used for a long time."""
    with torch.no_grad():
        first = ResNet().cuda().eval()
        for _ in range(50):
            first(torch.empty(4, 3, 32, 32, device="cuda"))
        second = Discriminator(*critic()).eval()
        for _ in range(80):
            second(torch.empty(64, 10, device="cuda"))
        Oracle().note([first, second], called=["", ""])


def inference():
    model = ResNet().cuda().eval()
    with torch.no_grad():
        for _ in range(8):
            model(torch.empty(4, 3, 32, 32, device="cuda"))
    Oracle().note([model])


def one_step():
    """The program ends after its only step."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.empty(64, 512, device="cuda")).sum().backward()
    Oracle().note([model], [optimizer])
    optimizer.step()


def oom():
    """The optimizer's first step runs out of memory (SIMCUDA_MEMORY); the state created before stays."""
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.empty(8, 4096, device="cuda")).sum().backward()
    oracle = Oracle()
    oracle.note([model], [optimizer])
    try:
        optimizer.step()
        print("enough memory")
    except torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError:
        oracle.note([model], [optimizer])
        print("caught", flush=True)


def objects():
    """The number of objects. With PyTorch 2.15 a thread of the backward pass may still have its context."""
    return sum(type(o) is not contextvars.Context for o in gc.get_objects())


def untouched():
    """Prints reference counts and garbage collector counts after each step: the same with and without memtrace."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    # How much garbage the imports leave depends on addresses.
    gc.collect()
    for _ in range(4):
        model(torch.empty(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        counted = [sys.getrefcount(o) for o in (model, optimizer, model[0], model[0].weight, optimizer.state, model._modules)]
        kept = [sys.getrefcount(o) for o in optimizer.state[model[0].weight].values()]
        grads = [sys.getrefcount(p.grad) for p in model.parameters()]
        print(counted, kept, grads, gc.get_count()[1:], objects(), sys.exc_info(), flush=True)
        optimizer.zero_grad()


if __name__ == "__main__":
    for case in sys.argv[1:]:
        globals()[case]()
