"""Activation checkpointing of both kinds: parts of the forward run again during backward."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
import oracle

oracle.start()
net = nn.ModuleList([nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    x = torch.randn(128, 512, device="cuda", requires_grad=True)
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=step % 2 == 0)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
