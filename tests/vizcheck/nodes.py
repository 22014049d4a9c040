"""Compares the autograd nodes that memtrace names with those that PyTorch's profiler saw the engine evaluate.

    python nodes.py OURS.pickle NODES.json

tests/programs/torch/forward_calls.py writes NODES.json. Every block of device 0 that was allocated or freed while a
node ran must name that node: the same blocks in the same order. Blocks outside of nodes are ignored, because the
profiler does not keep all of them. Prints how often each node was named, as JSON.
"""

import json
import pickle
import sys
from collections import Counter

from same import node, same


def main():
    with open(sys.argv[1], "rb") as f, open(sys.argv[2]) as g:
        trace, theirs = pickle.load(f)["device_traces"][0], json.load(g)
    ours = [
        (e["addr"], e["action"] == "alloc", node(e["frames"]))
        for e in trace
        if e["action"] in ("alloc", "free_completed") and node(e["frames"])
    ]
    # C++ nodes are named without their namespaces.
    theirs = [(address, size > 0, name.split("::")[-1]) for address, size, name in theirs if name]
    for i, (a, b) in enumerate(zip(ours, theirs)):
        same(f"block {i}", a, b)
    same("blocks", len(ours), len(theirs))
    print(json.dumps(Counter(name for _, _, name in ours)))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as difference:
        raise SystemExit(str(difference))
