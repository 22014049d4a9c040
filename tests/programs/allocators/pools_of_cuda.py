"""PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync with tensor sizes that are multiples of the pool's step. Nothing is
rounded, so PyTorch's statistics and the pool's own can be compared to the byte."""

import torch
import oracle

STEP = 32 << 20


def steps(count):
    return torch.empty(count * STEP, dtype=torch.uint8, device="cuda")


oracle.start()
side = torch.cuda.Stream()
kept = [steps(count) for count in (1, 4, 2, 8)]
with torch.cuda.stream(side):
    kept.append(steps(3))
del kept[1], kept[2]
torch.cuda.synchronize()
kept.append(steps(6))
del kept[0]
torch.cuda.synchronize()
torch.cuda.empty_cache()
kept.append(steps(2))
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
