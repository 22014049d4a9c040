"""Trains on several crops of an image, one forward pass each, with one backward pass of the sum of their losses."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("backward-each", "checkpoint-layers", "offload-activations", *changes.SGD)
CROPS = 3


class Stack(nn.Module):
    def __init__(self, channels=48):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(4))
        self.last = nn.Linear(channels, 100)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((2, 3)))


model = Stack().cuda()
CHANGES.checkpoint("blocks.*", model)
optimizer = CHANGES.optimizer(torch.optim.SGD, model, lr=0.01, momentum=0.9)
labels = torch.zeros(16, dtype=torch.long, device="cuda")
for step in range(4):
    total = 0
    for crop in range(CROPS):
        images = torch.randn(16, 3, 96, 96, device="cuda")
        with CHANGES.around_forward():
            loss = nn.functional.cross_entropy(model(images), labels)
        if "backward-each" in CHANGES:
            (loss / CROPS).backward()
        else:
            total = total + loss / CROPS
        del images, loss
    if "backward-each" not in CHANGES:
        total.backward()
    del total
    optimizer.step()
    optimizer.zero_grad()
changes.done()
