"""Fits a deep stack of layers, each an `nn.Sequential` in an `nn.Sequential`."""
# limits: 700M
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", *changes.ADAM, *changes.FORWARD)

stack = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)]).cuda()
CHANGES.checkpoint("*", stack)
optimizer = CHANGES.optimizer(torch.optim.AdamW, stack)
batch, accumulate = CHANGES.batches(4096)
for step in range(3):
    for _ in range(accumulate):
        x = torch.randn(batch, 1024, device="cuda")
        with CHANGES.around_forward():
            loss = stack(x).square().mean() / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
