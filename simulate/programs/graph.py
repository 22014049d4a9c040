"""CUDA graphs with a private pool, and a MemPool."""
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 256, device="cuda")


def step():
    model(x).sum().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
assert not torch.cuda.is_current_stream_capturing()
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    step()
assert not torch.cuda.is_current_stream_capturing()
reserved = torch.cuda.memory_reserved()
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
assert torch.cuda.memory_reserved() == reserved, "a replay allocates nothing"
pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
assert tuple(graph.pool()) in pools and (0, 0) in pools, pools

if hasattr(torch.cuda, "MemPool"):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = torch.empty(1 << 24, device="cuda")
    sizes = [s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    assert sizes == [64 << 20], sizes
