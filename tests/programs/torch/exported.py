"""Trains under torch.profiler from its first line, and exports PyTorch's timelines: theirs.json, theirs.raw.json.gz.

    exported.py FOLDER cuda:0|cpu
"""

import pathlib
import sys

import torch
from torch.profiler import ProfilerActivity, profile

functional = torch.nn.functional


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(256, 2048), torch.nn.LayerNorm(2048), torch.nn.Linear(2048, 256)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.dropout(self.norm(functional.gelu(self.first(x)))))


def train(device):
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        inputs, targets = torch.randn(1024, 256).to(device), torch.randn(1024, 256).to(device)
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


folder, device = pathlib.Path(sys.argv[1]), sys.argv[2]
with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True) as profiler:
    train(device)
for name in ("theirs.json", "theirs.raw.json.gz"):
    profiler.export_memory_timeline(str(folder / name), device)
