"""Trains with zero_grad(set_to_none=False), so that the gradients stay allocated through every forward pass."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("set-to-none", "smaller-batches", "checkpoint-layers", "bfloat16-model", *changes.ADAM, *changes.FORWARD)


class Encoder(nn.Module):
    def __init__(self, width=1024, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width), nn.LayerNorm(width))
                                    for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Encoder().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3)
rows, accumulate = CHANGES.batches(8192)
for step in range(4):
    for _ in range(accumulate):
        x = torch.randn(rows, 1024, device="cuda", dtype=CHANGES.dtype)
        with CHANGES.around_forward():
            y = model(x)
            loss = (y - x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none="set-to-none" in CHANGES)
changes.done()
