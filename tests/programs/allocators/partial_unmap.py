"""Expandable segments (expandable_segments:True) that lose memory in the middle, on two streams. Every second block is
freed, the cache is emptied in mid-run, and the holes are mapped again, in part and in pieces."""

import torch
import oracle

MIB = 1 << 20


def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def rounds(stream):
    with torch.cuda.stream(stream):
        blocks = [bytes_of(size * MIB) for size in (30, 2, 50, 21, 40, 3, 64, 25)]
        # Holes of 50, 40 and 64 MiB, minus the pages that live neighbors share.
        del blocks[2], blocks[3], blocks[4]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # Fill part of a hole, then a hole and a piece of the next, then the end of the segment.
        blocks += [bytes_of(size * MIB) for size in (12, 44, 90, 8)]
        del blocks[1], blocks[2], blocks[-1]
        torch.cuda.empty_cache()
        blocks.append(bytes_of(7 * MIB + 513))
        return blocks


oracle.start()
small = [torch.empty(1000 * i + 1, device="cuda") for i in range(300)]
kept = [rounds(torch.cuda.current_stream())]
kept.append(rounds(torch.cuda.Stream()))
# Free whole pages in the middle and at the end of the small segment.
del small[40:140], small[-60:]
torch.cuda.synchronize()
torch.cuda.empty_cache()
small += [torch.empty(700 * i + 1, device="cuda") for i in range(200)]
del kept[0]
torch.cuda.synchronize()
torch.cuda.empty_cache()
kept.append(rounds(torch.cuda.current_stream()))
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
