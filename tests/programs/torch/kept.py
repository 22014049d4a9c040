"""Trains a small model with Adam for 40 steps, with an evaluation after every tenth. A list keeps a tensor of each step.

The program ends without freeing anything.
"""

import os

import torch
import torch.nn as nn

KEPT = []


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(256, 512, device="cuda"))
    model.train()


def main() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(40):
        batch = torch.randn(128, 512).cuda()
        target = torch.randint(0, 512, (128,)).cuda()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        KEPT.append(torch.zeros(1 << 18, device="cuda"))
        if step % 10 == 9:
            evaluate(model)
    os._exit(0)


main()
