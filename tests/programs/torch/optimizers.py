"""Trains with an optimizer that refuses options of others: `amsgrad` (no 8-bit variant has it), `centered` (RMSprop's has it
neither), `lbfgs` (no foreach), or `adam` and `adagrad` (which take them)."""

import sys

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()
parameters = model.parameters()
optimizer = {
    "amsgrad": lambda: torch.optim.AdamW(parameters, amsgrad=True),
    "centered": lambda: torch.optim.RMSprop(parameters, centered=True),
    "lbfgs": lambda: torch.optim.LBFGS(parameters, max_iter=2, history_size=3),
    "adam": lambda: torch.optim.AdamW(parameters),
    "adagrad": lambda: torch.optim.Adagrad(parameters),
}[sys.argv[1]]()


def loss():
    optimizer.zero_grad()
    result = model(torch.randn(16, 1024, device="cuda")).square().mean()
    result.backward()
    return result


for _ in range(3):
    optimizer.step(loss)
