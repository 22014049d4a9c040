"""CUDA graphs at several batch sizes, in pools of their own and in a shared pool, graphed callables and a MemPool. Prints, as
JSON, what PyTorch's snapshot says about each capture and about each pool at the end."""

import gc
import json
import os
import sys

import torch
import torch.nn as nn


def pools():
    """By pool: bytes of segments, and bytes of allocated blocks."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        pool = str(tuple(segment["segment_pool_id"]))
        if pool != "(0, 0)":
            figures = found.setdefault(pool, [0, 0])
            figures[0] += segment["total_size"]
            figures[1] += segment["allocated_size"]
    return found


def sums():
    return [sum(figures[at] for figures in pools().values()) for at in (0, 1)]


model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 2048)).cuda()
static_input = torch.zeros(64, 1024, device="cuda")
with torch.no_grad():
    model(static_input)


def capture(batch, pool):
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    before = sums()
    with torch.no_grad(), torch.profiler.record_function(f"capture {batch}"), torch.cuda.graph(graph, pool=pool):
        output = model(static_input[:batch])
    after = sums()
    captures.append({"growth": after[0] - before[0], "kept": after[1] - before[1], "pool": str(tuple(graph.pool()))})
    return graph, output


captures = []
kept = [capture(batch, None) for batch in (2, 32)]
shared = torch.cuda.graph_pool_handle()
kept += [capture(batch, shared) for batch in (64, 32, 8, 1)]
layer = nn.Linear(512, 512).cuda()
graphed = torch.cuda.make_graphed_callables(layer, (torch.zeros(16, 512, device="cuda", requires_grad=True),))
graphed(torch.zeros(16, 512, device="cuda", requires_grad=True)).sum().backward()
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    inside = torch.zeros(40 << 20, device="cuda")
for graph, _ in kept:
    graph.replay()
torch.cuda.synchronize()
kept[0][0].reset()
# The program goes on after the reset, so that the end of the process did not destroy the graph.
after = torch.zeros(1000, device="cuda")
print(json.dumps({"captures": captures, "pools": pools(), "mem_pool": str(tuple(pool.id))}))
# The end of the process would free the tensors.
sys.stdout.flush()
os._exit(0)
