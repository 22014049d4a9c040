"""A model that is larger than the GPU of a laptop, whose driver takes memory of the host for the rest."""
# issue: spilled-to-host
# env: SIMCUDA_MEMORY=512M SIMCUDA_SPILL=1
import torch
import torch.nn as nn


def build(layers, width):
    parts = []
    for _ in range(layers):
        parts.append(nn.Linear(width, width, bias=False).cuda())  # issue here
    return nn.Sequential(*parts)


model = build(12, 4096)
with torch.no_grad():
    for batch in torch.randn(3, 8, 4096, device="cuda"):
        print(model(batch).shape)
