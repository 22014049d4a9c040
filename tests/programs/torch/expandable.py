"""Expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): maps, partial unmaps, training in between."""

import torch
import torch.nn as nn
import oracle

oracle.start()
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
del blocks[::2]
torch.cuda.empty_cache()
blocks.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
del blocks[1]
torch.cuda.empty_cache()
small = [torch.empty(100 * i + 1, device="cuda") for i in range(50)]
del small[10:40]
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
