"""Virtual kernel time (SIMCUDA_KERNEL_US=1000): a busy stream reports "not ready", and synchronization waits."""
import time

import torch

side = torch.cuda.Stream()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
x = torch.empty(100, device="cuda")
with torch.cuda.stream(side):
    start.record()
    for _ in range(200):
        x + 1
    end.record()
time.sleep(0.3)  # Time of the machine does not count.
assert not side.query() and not end.query()
torch.cuda.synchronize()
assert side.query() and end.query()
assert 199 < start.elapsed_time(end) < 202

# A program that polls gets there, too.
with torch.cuda.stream(side):
    x + 1
polls = 0
while not side.query():
    polls += 1
assert 100 < polls < 1000, polls
