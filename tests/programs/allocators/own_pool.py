"""A MemPool with segments from a pluggable allocator, beside PyTorch's own; FIRST makes it the process's first memory.

    python own_pool.py ALLOCATOR.so [FIRST]
"""

import sys

import torch
import oracle

own = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], "own_alloc", "own_free")
oracle.start()
if sys.argv[2:] != ["FIRST"]:
    before = torch.empty(1000, device="cuda")
pool = torch.cuda.MemPool(own.allocator())
with torch.cuda.use_mem_pool(pool):
    inside = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 5 << 20, 1 << 19, 33 << 20, 700)]
    del inside[1]
    inside.append(torch.empty(3 << 20, dtype=torch.uint8, device="cuda"))
outside = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 5 << 20)]
del inside[2]
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
