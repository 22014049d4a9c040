"""An allocation that succeeds after a cache flush, then one that fails and is caught (SIMCUDA_MEMORY=8G)."""

import torch
import oracle

oracle.start()
blocks = []
try:
    while True:
        blocks.append(torch.empty(512 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as error:
    print("caught after", len(blocks), "blocks:", str(error).split(".")[0])
del blocks[:4]
again = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("caught again")
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
