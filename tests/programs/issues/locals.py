# issue: leak
"""Keeps each result in a list that is a local variable, so that it is freed when the function returns, before the program ends."""

import torch
from torch import nn


@torch.no_grad()
def main():
    kept = []
    model = nn.Linear(1024, 1024).cuda()
    for _ in range(60):
        kept.append(model(torch.randn(1024, 1024, device="cuda")))  # issue here


main()
