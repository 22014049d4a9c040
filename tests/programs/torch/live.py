"""Allocates, says how much is allocated, and waits for a line on stdin before it goes on.

Trains a small model with Adam, five steps for a line. A list keeps one more tensor in each step. For a number, it trains
so many steps, and keeps nothing.
"""

import json
import sys

import torch

MODEL = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
OPTIMIZER = torch.optim.Adam(MODEL.parameters())
KEPT = []


def step(keeps: bool = True) -> None:
    OPTIMIZER.zero_grad()
    MODEL(torch.randn(64, 1024, device="cuda")).sum().backward()
    OPTIMIZER.step()
    if keeps:
        KEPT.append(torch.zeros(1 << 20, device="cuda"))


def report() -> str:
    """Prints PyTorch's figures, and waits. The end of stdin ends the program; `oom` requests too much memory first."""
    figures = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "parameters": sum(parameter.nbytes for parameter in MODEL.parameters()),
    }
    print(json.dumps(figures), flush=True)
    line = sys.stdin.readline().strip()
    if not line:
        sys.exit()
    if line == "oom":
        try:
            torch.empty(1 << 45, device="cuda")
        except torch.OutOfMemoryError:
            pass
    return line


def main() -> None:
    while True:
        line = report()
        for _ in range(int(line) if line.isdigit() else 5):
            step(keeps=not line.isdigit())


main()
