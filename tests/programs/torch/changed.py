"""A few training steps with a batch size and kept tensors as the command line says. Prints torch's own peaks as JSON.

    changed.py [--batch N] [--keep]

`--keep`: each step keeps an extra tensor of the batch's size.
"""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--keep", action="store_true")
options = parser.parse_args()
history = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x):
        y = torch.relu(self.up(x))
        if options.keep:
            history.append(y.detach().clone())
        return self.down(y)


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.empty(options.batch, 512, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
stats = torch.cuda.memory_stats()
print(json.dumps({name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved")}))
