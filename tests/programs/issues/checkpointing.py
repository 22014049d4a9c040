"""Activation checkpointing of each block."""
# issue: none
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)).cuda()
optimizer = torch.optim.Adam(blocks.parameters())
for step in range(7):
    x = torch.randn(1024, 512, device="cuda")
    for block in blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
