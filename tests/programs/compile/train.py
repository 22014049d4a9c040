"""Training with torch.compile: graph breaks with resumed functions, recompilation for a new shape, modules, functions.

train.py BACKEND: `eager`, `aot_eager` or `inductor`.
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch"))
import oracle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 64)

    def forward(self, x):
        h = torch.relu(self.first(x))
        print("a break in the middle", tuple(x.shape))
        h = [self.second(h + k) for k in range(2)]
        torch._dynamo.graph_break()
        return self.last(torch.cat(h)).float()


def penalty(model):
    return sum((p * p).sum() for p in model.parameters())


def generated(x):
    for part in x.split(16):
        yield part * 2


def consume(x):
    kept = []
    for part in generated(x):
        kept.append(part + 1)
    torch._dynamo.graph_break()
    return torch.cat(kept) @ x.t()


def main(backend):
    torch.manual_seed(0)
    oracle.start()
    model = Net().cuda()
    compiled = torch.compile(model, backend=backend)
    regular = torch.compile(penalty, backend=backend)
    consumed = torch.compile(consume, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    for size in (32, 32, 48):
        out = compiled(torch.empty(size, 256, device="cuda"))
        loss = F.mse_loss(out, torch.empty_like(out)) + regular(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        consumed(torch.empty(size, 128, device="cuda"))
    torch.cuda.synchronize()
    oracle.finish()


if __name__ == "__main__":
    main(sys.argv[1])
