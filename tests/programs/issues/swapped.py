# issue: none
"""Adds a named adapter for each task, and removes it after the task."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.ModuleDict()
        self.up = nn.ModuleDict()

    def forward(self, x, task):
        return x + self.base(x) + self.up[task](self.down[task](x))


def main():
    layers = nn.ModuleList(Layer(1024) for _ in range(8)).cuda().eval()
    for number in range(12):
        task = f"task{number}"
        for layer in layers:
            layer.down[task] = nn.Linear(1024, 256, bias=False).cuda()
            layer.up[task] = nn.Linear(256, 1024, bias=False).cuda()
        for _ in range(3):
            x = torch.randn(512, 1024, device="cuda")
            with torch.no_grad():
                for layer in layers:
                    x = layer(x, task)
            x.argmax(-1).cpu()
        for layer in layers:
            del layer.down[task], layer.up[task]


main()
