"""Backward passes of many kinds, one per name on the command line, to test the forward call of every backward event.

Under anomaly mode (MEMTRACE_TEST_ANOMALY=1) PyTorch 2.11's recorder writes `forward_frames` with each backward event.
With MEMTRACE_TEST_NODES PyTorch's profiler is the oracle of the nodes' names. Every allocation and free goes to that
file as JSON, in order: [address, signed size, the node that the engine was evaluating or null].
"""

import contextlib
import json
import os
import sys
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._C._profiler import _EventType
from torch.utils.checkpoint import checkpoint
import oracle

NODES = os.environ.get("MEMTRACE_TEST_NODES")
EVALUATES = "autograd::engine::evaluate_function: "
DEVICE = "cuda"


class Cube(torch.autograd.Function):
    """Saves tensors, allocates in its backward, and is differentiable twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        scratch = torch.ones_like(x)
        return grad * 3 * x * x * scratch


class Pair(torch.autograd.Function):
    """Two inputs and two outputs, one of which gets no gradient."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx, of_product, of_sum):
        a, b = ctx.saved_tensors
        return of_product * b + of_sum, of_product * a + of_sum


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(
            x + self.norm(
                self.conv(x)
            )
        )


def function():
    a = torch.randn(300, 300, device=DEVICE, requires_grad=True)
    b = torch.randn(300, 300, device=DEVICE, requires_grad=True)
    for _ in range(2):
        product, total = Pair.apply(Cube.apply(a), b)
        loss = (product * 2).sum()
        loss.backward()


def modules():
    # The simulated CUDA does not have cuDNN's LSTM.
    torch.backends.cudnn.enabled = False
    net = nn.Sequential(nn.Embedding(100, 64), nn.LSTM(64, 32)).to(DEVICE)
    head = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5)).to(DEVICE)
    tokens = torch.randint(0, 100, (7, 3), device=DEVICE)
    for _ in range(2):
        out, _ = net(tokens)
        F.cross_entropy(head(out).flatten(0, 1), torch.zeros(21, dtype=torch.long, device=DEVICE)).backward()


def convolutions():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *[Block(8) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net.to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(2, 3, 16, 16, device=DEVICE)).sum().backward()
        optimizer.step()


def scale(parameter):
    parameter.grad *= parameter.grad.norm()


def accumulate():
    weight = torch.randn(500, 500, device=DEVICE, requires_grad=True)
    bias = torch.randn(500, device=DEVICE, requires_grad=True)
    bias.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(scale)
    for _ in range(3):
        x = torch.randn(4, 500, device=DEVICE)
        (F.linear(x, weight, bias).expand(2, 4, 500) + weight[:4]).sum().backward()


def checkpointed(reentrant):
    net = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3)]).to(DEVICE)
    for _ in range(2):
        x = torch.randn(16, 64, device=DEVICE, requires_grad=True)
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()


def checkpoint_reentrant():
    checkpointed(True)


def checkpoint_saved():
    checkpointed(False)


def forward_threads():
    """Two threads build graphs at once. Sequence numbers are counted per thread, so equal ones occur."""
    ready = threading.Barrier(2)
    losses = [None, None]

    def first():
        x = torch.randn(200, 200, device=DEVICE, requires_grad=True)
        ready.wait()
        for _ in range(20):
            x = torch.tanh(x)
        losses[0] = x.sum()

    def second():
        x = torch.randn(300, 300, device=DEVICE, requires_grad=True)
        ready.wait()
        for _ in range(20):
            x = torch.sigmoid(x)
        losses[1] = x.sum()

    threads = [threading.Thread(target=f) for f in (first, second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    # One backward pass over both graphs, started by a third thread.
    (losses[0] + losses[1]).backward()


def backward_threads():
    """Each thread runs its own forward and backward; the device's autograd thread serves both."""

    def work(size):
        weight = torch.randn(size, size, device=DEVICE, requires_grad=True)
        for _ in range(5):
            Cube.apply(torch.tanh(weight @ weight)).sum().backward()

    threads = [threading.Thread(target=work, args=(100 + i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def double_backward():
    x = torch.randn(200, 200, device=DEVICE, requires_grad=True)
    y = (Cube.apply(x) * torch.exp(x)).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = grad.pow(2).mean()
    penalty.backward()


def retain_graph():
    x = torch.randn(200, 200, device=DEVICE, requires_grad=True)
    y = torch.relu(x @ x).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(y, x)


CASES = [function, modules, convolutions, accumulate, checkpoint_reentrant, checkpoint_saved, forward_threads, backward_threads,
         double_backward, retain_graph]



def blocks(events, node=None):
    """The profiler's allocations on the device, each with the node around it."""
    for event in events:
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.device.type == DEVICE:
            yield event.start_time_ns, [fields.ptr, fields.alloc_size, node]
        # The innermost node: a node's backward may run another backward pass.
        inside = event.name[len(EVALUATES) :] if event.name.startswith(EVALUATES) else node
        yield from blocks(event.children, inside)


chosen = [case for case in CASES if case.__name__ in sys.argv[1:]]
assert len(chosen) == len(sys.argv) - 1 > 0, f"one of {[case.__name__ for case in CASES]}"
torch.manual_seed(0)
oracle.start()
profiler = torch.profiler.profile(profile_memory=True) if NODES else contextlib.nullcontext()
with torch.autograd.set_detect_anomaly(os.environ.get("MEMTRACE_TEST_ANOMALY") == "1", check_nan=False), profiler:
    for case in chosen:
        case()
if NODES:
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    with open(NODES, "w") as f:
        json.dump([block for _, block in sorted(blocks(tree), key=lambda b: b[0])], f)
oracle.finish()
