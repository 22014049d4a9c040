"""Allocates, says how much is allocated, and waits for a line on stdin before it goes on.

Trains a small model with Adam. A list keeps one more tensor in each step.
"""

import json
import sys

import torch

MODEL = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
OPTIMIZER = torch.optim.Adam(MODEL.parameters())
KEPT = []


def step() -> None:
    OPTIMIZER.zero_grad()
    MODEL(torch.randn(64, 1024, device="cuda")).sum().backward()
    OPTIMIZER.step()
    KEPT.append(torch.zeros(1 << 20, device="cuda"))


def report() -> None:
    """Prints PyTorch's figures, and waits. The end of stdin ends the program; `oom` requests too much memory first."""
    figures = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    print(json.dumps(figures), flush=True)
    line = sys.stdin.readline().strip()
    if not line:
        sys.exit()
    if line == "oom":
        try:
            torch.empty(1 << 45, device="cuda")
        except torch.OutOfMemoryError:
            pass


def main() -> None:
    report()
    while True:
        for _ in range(5):
            step()
        report()


main()
