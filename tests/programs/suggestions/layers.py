"""Applies four large layers to three batches with gradients, and keeps the last output."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("no-grad", "half-the-batch", "smaller-evaluation-batch")

layers = []
for _ in range(4):
    layers += [nn.Linear(4096, 4096, bias=False), nn.GELU()]
model = nn.Sequential(*layers).cuda().eval()
batch, turns = (2048, 6) if "half-the-batch" in CHANGES or "smaller-evaluation-batch" in CHANGES else (4096, 3)
with torch.set_grad_enabled("no-grad" not in CHANGES):
    for _ in range(turns):
        output = model(torch.zeros(batch, 4096).cuda())
changes.done()
