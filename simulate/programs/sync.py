"""Virtual kernel time (SIMCUDA_KERNEL_US=1000): a busy stream reports "not ready", and synchronization waits."""
import time

import torch

side = torch.cuda.Stream()
x = torch.empty(100, device="cuda")
with torch.cuda.stream(side):
    for _ in range(200):
        x + 1
assert not side.query()
start = time.monotonic()
torch.cuda.synchronize()
assert side.query() and time.monotonic() - start > 0.05
