"""Training on the CPU, with PyTorch's profiler as the oracle of every CPU tensor.

Between two phases a tensor with a unique size is allocated and freed: first 1000003 bytes, then one byte more each
time. The phases' names go to stdout. MEMTRACE_TEST_ORACLE names the file for the profiler's allocations, [address,
signed size], as JSON.
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
    # A stable sort: allocations within one nanosecond keep the tree's order.
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = sorted(allocations(tree), key=lambda a: a[0])
    with open(PATH, "w") as f:
        json.dump([[address, size] for _, address, size in found], f)
