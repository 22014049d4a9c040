"""CUDA graphs and private pools: captures with their own and with a shared pool, replays, make_graphed_callables, a
deleted graph, MemPools."""

import torch
import torch.nn as nn
import oracle

oracle.start()
static = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()


def capture(pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = static * 2
        z = torch.cat([y, y])
        del y
        w = z.sum() + torch.empty(3 << 20, device="cuda").sum()
    return graph, z, w


first = capture()
second = capture(pool=first[0].pool())
third = capture(pool=torch.cuda.graph_pool_handle())
for _ in range(3):
    for graph, *_ in (first, second, third):
        graph.replay()
between = [torch.empty(1 << 18, device="cuda") for _ in range(5)]
del third
torch.cuda.synchronize()
torch.cuda.empty_cache()

layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()).cuda() for _ in range(2)]
inputs = [(torch.randn(32, 256, device="cuda", requires_grad=True),) for _ in range(2)]
graphed = torch.cuda.make_graphed_callables(tuple(layers), tuple(inputs))
optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1, momentum=0.9)
for _ in range(2):
    x = torch.randn(32, 256, device="cuda", requires_grad=True)
    for layer in graphed:
        x = layer(x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()

pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    pooled = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 5 << 20, 1 << 19, 33 << 20)]
with torch.cuda.use_mem_pool(other):
    others = torch.empty(2 << 20, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        inner = torch.empty(1 << 20, device="cuda")
outside = torch.empty(1 << 20, device="cuda")
del pooled[1]
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
