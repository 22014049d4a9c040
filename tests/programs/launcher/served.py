"""Allocates, prints what PyTorch counts, and goes on with each line of stdin."""

import sys

import torch

kept = [torch.empty(1000, 1000, device="cuda") for _ in range(5)]
del kept[2]
torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), flush=True)
sys.stdin.readline()
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("out of memory", flush=True)
sys.stdin.readline()
