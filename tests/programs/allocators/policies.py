"""Effects of PYTORCH_CUDA_ALLOC_CONF and similar settings on the allocator: one program, settings from the caller.

    python policies.py [FRACTION]    FRACTION: set_per_process_memory_fraction, then allocate until a request fails
"""

import sys

import torch
import oracle

MIB = 1 << 20
FRACTION = float(sys.argv[1]) if len(sys.argv) > 1 else None


def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


oracle.start()
if FRACTION:
    torch.cuda.set_per_process_memory_fraction(FRACTION)
kept = []
for step in range(12):
    sizes = [(step * 7 + i * 5) % 61 + 1 for i in range(6)]
    blocks = [bytes_of(size * MIB + step * 1000 + 1) for size in sizes]
    small = [bytes_of((step * 37 + i * 101) % 3000 * 300 + 1) for i in range(20)]
    kept.append(blocks[step % 6])
    del blocks, small
    if step % 4 == 3:
        del kept[::2]
    if step == 7:
        torch.cuda.empty_cache()
if FRACTION:
    try:
        while True:
            kept.append(bytes_of(100 * MIB))
    except torch.cuda.OutOfMemoryError as error:
        print("caught:", str(error).split(".")[0])
    del kept[::2]
    kept.append(bytes_of(60 * MIB))
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
