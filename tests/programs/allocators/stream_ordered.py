"""Training and single tensors on two streams, with the cache emptied in mid-run. The caller chooses the allocator:
PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, or a library for CUDAPluggableAllocator as the argument.

    python stream_ordered.py [ALLOCATOR.so]
"""

import sys

import torch
import torch.nn as nn
import oracle

if sys.argv[1:]:
    own = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], "own_alloc", "own_free")
    torch.cuda.memory.change_current_allocator(own)
oracle.start()
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
side = torch.cuda.Stream()
for _ in range(3):
    x = torch.randn(64, 512, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.stream(side):
        y = torch.empty(3 << 20, device="cuda")
        if not sys.argv[1:]:
            x.record_stream(side)
    del x
big = [torch.empty(40 << 20, dtype=torch.uint8, device="cuda") for _ in range(6)]
del big[::2]
torch.cuda.synchronize()
if not sys.argv[1:]:
    torch.cuda.empty_cache()
big.append(torch.empty(10 << 20, dtype=torch.uint8, device="cuda"))
oracle.finish()
