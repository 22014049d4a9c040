"""Measures on a GPU the workspaces of convolutions with `torch.backends.cudnn.benchmark`, for rows of `convolutions.py`.

    python benchmarked.py CONVOLUTIONS.json SHARE SHARES SECONDS OUT.jsonl

Each row of the result is one of CONVOLUTIONS.json and two lists with a number of bytes for each pass: what the first
call requested at most, which tries the algorithms, and the second one: the columns `benchmarked` and `chosen` of
`convolutions.json.gz`, which are null in rows that were not computed so. A process computes every SHARES-th row from SHARE
on: most of the time is the CPU's, so that several processes can share a GPU while its memory is not scarce.
"""

import json
import sys
import time

import torch
from convolutions import extra, passes


def measure(row):
    """The bytes of the first call and of the second, for each pass."""
    found = []
    for run in passes(row):
        # PyTorch tries only algorithms whose workspace fits into the free memory.
        torch.cuda.empty_cache()
        found.append((extra(run), extra(run)))
    return list(zip(*found))


def main():
    share, shares, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    end = time.monotonic() + seconds
    with open(sys.argv[1]) as file:
        rows = json.load(file)["rows"][share::shares]
    with open(sys.argv[5], "w") as out:
        for row in rows:
            if time.monotonic() > end:
                break
            out.write(json.dumps([*row, *measure(row[1:10])]) + "\n")
            out.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
