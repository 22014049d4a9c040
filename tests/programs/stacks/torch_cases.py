"""Stacks inside PyTorch, compared with Python's and with PyTorch's own recorder (`CapturedTraceback`)."""

import sys

import torch
import torch.utils.checkpoint
from torch._C._profiler import gather_traceback, symbolize_tracebacks

from probe import Checker, Probe, compare, described

failed = passed = 0


class TorchChecker(Checker):
    """Also compares with the stack of PyTorch's recorder."""

    def __call__(self, *_ignored):
        super().__call__()
        captured, want = gather_traceback(True, False, False), described(sys._getframe())
        theirs = [(frame["name"], frame["filename"], frame["line"]) for frame in symbolize_tracebacks([captured])[0]]
        compare([(frame[0], frame[2], frame[3]) for frame in want], theirs)
        return 0


check = None


class Probed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        check()
        return x * 2

    @staticmethod
    def backward(context, gradient):
        check()
        return gradient * 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = Probed.apply(layer(x))
            check()
        return x


def case_module(check):
    model = Model()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: check() or None)
        layer.register_full_backward_hook(lambda *_: check() or None)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: check() or None)
    for _ in range(3):
        loss = model(torch.ones(2, 8)).sum()
        loss.register_hook(lambda g: check() or None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def case_checkpoint(check):
    model = Model()
    for reentrant in (False, True):
        x = torch.ones(2, 8, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()


def case_torch_function(check):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            check()
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(3) + torch.ones(3)


def case_fx(check):
    """Generated code, compiled repeatedly from source that is made at run time."""
    def program(x):
        return torch.relu(x + 1).sum()

    for n in range(5):
        traced = torch.fx.symbolic_trace(program)
        for node in traced.graph.nodes:
            if node.target is torch.relu:
                node.target = lambda x: (check(), torch.relu(x))[1]
        traced.graph.lint()
        traced.recompile()
        traced(torch.ones(2))


def case_dynamo(check):
    if not hasattr(torch, "compile"):
        return

    @torch.compiler.disable
    def outside(x):
        check()
        return x

    def program(x, n):
        for _ in range(n):
            x = torch.sin(x)
            x = outside(x)
            x = x + 1
        return x

    compiled = torch.compile(program, backend="eager", dynamic=False)
    for n in (1, 2, 3):
        compiled(torch.ones(3), n)
    torch._dynamo.reset()
    compiled(torch.ones(3), 2)


def case_data_loader(check):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if torch.utils.data.get_worker_info() is not None and index == 0:
                check.probe.library.probe_reset()
            check()
            return torch.ones(1) * index

    for workers in (0, 1):
        assert len(list(torch.utils.data.DataLoader(Data(), num_workers=workers))) == 4


torch.set_num_threads(1)
for released in (True, False):
    probe = Probe(released)
    assert probe.capture(), probe.reason()
    check = TorchChecker(probe)
    for name, case in sorted(globals().items()):
        if name.startswith("case_"):
            try:
                case(check)
                passed += 1
            except Exception as error:
                failed += 1
                print("%s, GIL %s: %s: %s" % (name, "released" if released else "kept", type(error).__name__, error))
print("%s, torch %s: %d passed, %d failed" % (sys.version.split()[0], torch.__version__, passed, failed))
sys.exit(failed != 0)
