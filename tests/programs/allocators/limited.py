"""Allocates until the memory is full, and prints how much there is: for a library that limits GPU memory."""

import torch

free, total = torch.cuda.mem_get_info()
print("free", free, "total", total)
kept = []
try:
    while True:
        kept.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("failed after", len(kept))
del kept[3:]
torch.cuda.empty_cache()
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
print("free", torch.cuda.mem_get_info()[0])
