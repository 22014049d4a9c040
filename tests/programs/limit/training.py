"""Trains with ever larger batches until the device is full, and prints what PyTorch says. The output is the same on a device of
this size and under a limit of it."""

import gc
import re

import torch

properties = torch.cuda.get_device_properties(0)
print("total", properties.total_memory, torch.cuda.mem_get_info())
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = 1024
while True:
    try:
        loss = model(torch.randn(batch, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        print(re.sub(r"[Pp]rocess \d+", "Process", str(error)))
        break
    print(batch, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info())
    batch *= 2
loss = None
gc.collect()
torch.cuda.empty_cache()
print("after", torch.cuda.memory_reserved(), torch.cuda.mem_get_info())
kept = []
while True:
    try:
        kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        break
print("full after", len(kept), torch.cuda.mem_get_info())
