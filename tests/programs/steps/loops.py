"""Training loops of many kinds. Each counts its own steps and marks them: each iteration of the loop is a range named
`turn N`."""

import json
import sys

import torch
from torch import nn
from torch.profiler import record_function

device = "cuda"
turns = 0


def turn():
    """Starts the range of the loop's next iteration."""
    global turns
    turns += 1
    return record_function(f"turn {turns - 1}")


def net(width=64):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)).to(device)


def batch(rows=16, width=64):
    return torch.randn(rows, width, device=device)


def plain(optimizer=lambda p: torch.optim.Adam(p)):
    model = net()
    o = optimizer(model.parameters())
    for _ in range(5):
        with turn():
            loss = model(batch()).square().mean()
            o.zero_grad()
            loss.backward()
            o.step()


def allocates_nothing():
    """SGD without momentum, with gradients that keep their memory."""
    model = net()
    o = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(5):
        with turn():
            model(batch()).sum().backward()
            o.step()
            o.zero_grad(set_to_none=False)


def accumulation():
    model = net()
    o = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        with turn():
            for _ in range(3):
                (model(batch()).square().mean() / 3).backward()
            o.step()
            o.zero_grad()


def evaluation():
    """Epochs with an evaluation after each, and a loader for both."""
    data = torch.utils.data.TensorDataset(torch.randn(48, 64))
    training, test = (torch.utils.data.DataLoader(data, batch_size=16) for _ in range(2))
    model = net()
    o = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model.train()
        loader = iter(training)
        for _ in range(len(training)):
            with turn():
                (x,) = next(loader)
                o.zero_grad()
                loss = model(x.to(device)).square().mean()
                loss.backward()
                o.step()
                seen = loss.detach() * 2
        assert next(loader, None) is None
        model.eval()
        with torch.no_grad():
            for (x,) in test:
                seen += model(x.to(device)).sum()


def inference():
    model = net()
    with torch.no_grad():
        for _ in range(4):
            with turn():
                x = batch()
                model(x).sum()


def several():
    """Two optimizers after one backward, at two lines, and two at one line."""
    models = [net() for _ in range(4)]
    a, b, *others = [torch.optim.Adam(m.parameters()) for m in models]
    for _ in range(4):
        with turn():
            x = batch()
            sum(m(x).square().mean() for m in models).backward()
            a.step()
            b.step()
            for o in others:
                o.step()
            for o in [a, b, *others]:
                o.zero_grad()


def alternating():
    """A GAN: two networks, each with its own backward, clearing and step."""
    d, g = net(), nn.Linear(32, 64).to(device)
    d_optimizer, g_optimizer = torch.optim.Adam(d.parameters()), torch.optim.Adam(g.parameters())
    for _ in range(4):
        with turn():
            fake = g(batch(16, 32))
            d_optimizer.zero_grad()
            (d(fake.detach()).mean() - d(batch()).mean()).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            (-d(fake).mean()).backward()
            g_optimizer.step()


def closure():
    model = net()
    o = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch()

    def evaluate():
        o.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        with turn():
            o.step(evaluate)


def skipped():
    """A gradient scaler that skips steps with non-finite gradients. Nothing is computed over the simulated CUDA. So the
    program itself decides, as the scaler would, and does not call `optimizer.step`."""
    model = net()
    o = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        with turn():
            o.zero_grad()
            x = batch()
            loss = model(x).square().mean()
            (loss * 1024).backward()
            if i not in (1, 4):
                o.step()


def groups():
    """One optimizer per layer, stepped by a helper (as ZeRO's partitions are): one call site, no backward between."""
    model = net()
    optimizers = [torch.optim.Adam(layer.parameters()) for layer in model if list(layer.parameters())]

    def step():
        for o in optimizers:
            o.step()
            o.zero_grad()

    for _ in range(4):
        with turn():
            model(batch()).square().mean().backward()
            step()


def phases():
    """Two loops, one after the other, with the same model."""
    model = net()
    o = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with turn():
            model(batch()).square().mean().backward()
            o.step()
            o.zero_grad()
    for _ in range(3):
        with turn():
            model(batch(32)).abs().mean().backward()
            o.step()
            o.zero_grad()


class Own(torch.optim.Optimizer):
    """The program's own optimizer, in a file that no rule knows."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"] * 0.01)


def own():
    plain(Own)


def compiled():
    model = torch.compile(net(), backend="aot_eager")
    o = torch.optim.Adam(model.parameters())
    # The first call compiles.
    for _ in range(4):
        with turn():
            model(batch()).square().mean().backward()
            o.step()
            o.zero_grad()


def in_backward():
    """One optimizer per parameter, stepped and cleared as soon as the parameter has its gradient."""
    model = net()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def use(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(use)
    for _ in range(4):
        with turn():
            model(batch()).square().mean().backward()


def two_lines():
    """One optimizer that two lines call in turn."""
    model = net()
    o = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with turn():
            model(batch()).square().mean().backward()
            o.step()
            o.zero_grad()
        with turn():
            model(batch(32)).abs().mean().backward()
            o.step()
            o.zero_grad()


def cleared_between():
    model = net()
    o = torch.optim.Adam(model.parameters())
    for _ in range(4):
        with turn():
            loss = model(batch()).square().mean()
            o.zero_grad()
            loss.backward()
            o.step()


class Rotated(nn.Module):
    """A model with a part that computes without gradients."""

    def __init__(self, first):
        super().__init__()
        self.first, self.layers = first, net()

    @torch.no_grad()
    def angles(self, x):
        return torch.cos(x * 2)

    def forward(self, x):
        return self.layers(self.angles(x) + x) if self.first else self.layers(x) * self.angles(x).mean()


def parts_without_gradients():
    models = [Rotated(True), Rotated(False)]
    o = torch.optim.Adam([p for model in models for p in model.parameters()])
    for _ in range(4):
        with turn():
            x = batch()
            sum(model(x).square().mean() for model in models).backward()
            o.step()
            o.zero_grad()


def evaluations_around():
    """An evaluation before and one after the training, which make their batches with gradients enabled."""
    model = net()
    o = torch.optim.Adam(model.parameters())

    def evaluate():
        for _ in range(3):
            x = batch()
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                loss = model(x).square().mean()
            loss * 2

    evaluate()
    for _ in range(4):
        with turn():
            model(batch()).square().mean().backward()
            o.step()
            o.zero_grad()
    evaluate()


def dropped_graphs():
    """An evaluation with gradients enabled in the middle and at the end of the training."""
    model = net()
    o = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for _ in range(3):
            with turn():
                x = batch()
                model(x).square().mean().backward()
                o.step()
                o.zero_grad()
        for _ in range(3):
            total = model(x).square().mean()
    del total


def data_without_gradients():
    """The next batch is made without gradients after the optimizer's step."""
    model = net()
    o = torch.optim.Adam(model.parameters())
    x = batch()
    for _ in range(4):
        with turn():
            model(x).square().mean().backward()
            o.step()
            o.zero_grad()
            with torch.no_grad():
                x = nn.functional.avg_pool1d(batch(16, 128), 2)


def collected():
    """Reinforcement learning: states are collected with the policy before each part of the training, and stored."""
    policy, target = net(), net()
    o = torch.optim.Adam(policy.parameters())
    states = torch.zeros(8, 16, 64, device=device)
    for _ in range(3):
        state = batch()
        for i in range(8):
            with torch.no_grad():
                action = policy(state)
            state = batch() + action.mean()
            states[i].copy_(state)
        for i in range(4):
            with turn():
                x = states[i : i + 4].flatten(0, 1).clone()
                with torch.no_grad():
                    expected = target(x)
                (policy(x) - expected).square().mean().backward()
                o.step()
                o.zero_grad()


class Cached(nn.Module):
    """A layer that reads what all its earlier inputs left in its cache."""

    def __init__(self):
        super().__init__()
        self.first, self.key, self.value, self.last = (nn.Linear(64, 64) for _ in range(4))
        self.cache = None

    def forward(self, x, keep=False):
        x = self.first(x)
        key, value = self.key(x), self.value(x)
        if self.cache is not None:
            key = torch.cat([self.cache[0], key], dim=1)
            value = torch.cat([self.cache[1], value], dim=1)
        self.cache = (key, value) if keep else None
        return self.last(nn.functional.scaled_dot_product_attention(x, key, value))


def tokens():
    """A training, and then sequences of tokens one by one, after their prompts."""
    model = Cached().to(device)
    o = torch.optim.Adam(model.parameters())
    for _ in range(4):
        with turn():
            model(batch().unflatten(0, (2, 8))).square().mean().backward()
            o.step()
            o.zero_grad()
    with torch.no_grad():
        for _ in range(2):
            model.cache = None
            x = model(batch().unflatten(0, (2, 8)), keep=True)[:, -1:]
            for _ in range(6):
                x = model(x.clone(), keep=True)


torch.empty(64, device=device)
globals()[sys.argv[1]]()
print(json.dumps({"turns": turns}))
