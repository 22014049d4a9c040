"""A training that needs more memory than a small device has. Prints `torch.cuda.max_memory_allocated()` if it fits.

    python oom_steps.py forward     the activations of eight equal blocks do not fit
    python oom_steps.py optimizer   the first step of AdamW does not fit
    python oom_steps.py second      the second step does not fit, because the optimizer's state is there
    python oom_steps.py evaluate    the second batch of an evaluation does not fit, because the first one's graph lives
"""

import sys

import torch
import torch.nn as nn

what = sys.argv[1]
width = 1024 if what in ("optimizer", "second") else 512
batch = 512 if what == "optimizer" else 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())


def train(steps):
    for _ in range(steps):
        model(torch.zeros(batch, width, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if what == "evaluate":
    train(1)
    for _ in range(2):
        result = model(torch.zeros(2 * batch, width, device="cuda")).mean()
else:
    train(3)
print(torch.cuda.max_memory_allocated())
