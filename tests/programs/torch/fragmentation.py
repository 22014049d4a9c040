"""Growing batches, more than half of each is kept. The rest of a batch's memory is too small for the next result, so
every batch gets its own segment. A third of the reserved memory stays unused.

    python fragmentation.py [catch]    catch: handles the error and continues with less
"""

import sys

import torch

MIB = 1 << 20
CATCH = "catch" in sys.argv[1:]


def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def batch_of(step):
    return bytes_of((40 + 3 * step) * MIB)


def result_of(step):
    return bytes_of((26 + 2 * step) * MIB)


results = []
for step in range(20):
    try:
        batch = batch_of(step)
    except torch.cuda.OutOfMemoryError as error:
        if not CATCH:
            raise
        print("caught at", step)
        del results[::2]
        continue
    del batch
    results.append(result_of(step))
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved(), "peak", torch.cuda.max_memory_reserved())
