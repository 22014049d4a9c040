"""Training on the CPU, with PyTorch's profiler as the oracle of every CPU tensor.

Between any two stretches of work a tensor of a size that nothing else has is made and dropped: 1000003 bytes first, one more
each time. The names of the stretches go to stdout. With MEMTRACE_TEST_ORACLE the profiler's allocations, [address, signed
size], are written there as JSON.
"""

import contextlib
import json
import os

import torch
import torch.nn as nn
from torch._C._profiler import _EventType

PATH = os.environ.get("MEMTRACE_TEST_ORACLE")
names = []


def mark(name):
    torch.empty(1000003 + len(names), dtype=torch.uint8)
    names.append(name)


def allocations(events):
    for event in events:
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.device == torch.device("cpu"):
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from allocations(event.children)


profiler = torch.profiler.profile(profile_memory=True) if PATH else contextlib.nullcontext()
with profiler:
    mark("load")
    model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        mark("other")
        x = torch.randn(64, 300)
        mark("forward")
        loss = model(x).square().mean()
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        mark("other")
        optimizer.zero_grad()
        loss = x = None
    mark("end")
print(*names)
if PATH:
    # A stable order: what happened in one nanosecond happened in the tree's order.
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = sorted(allocations(tree), key=lambda a: a[0])
    with open(PATH, "w") as f:
        json.dump([[address, size] for _, address, size in found], f)
