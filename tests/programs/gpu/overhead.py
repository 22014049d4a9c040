"""The cost of recording: nanoseconds for one `torch.empty` and its free, in processes that take turns.

The children are forked before CUDA is used, from one image on one machine. `plain` has no session and records nothing;
`memtrace` is recorded by us; `python` and `all` have no session and use PyTorch's recorder. They run the same rounds in
turn, so that drift of the machine affects all alike. Prints JSON: for each depth and kind the median of the rounds.
"""

import json
import os
import statistics
import sys
import time

KINDS = ["plain", "memtrace", "python", "all"]
DEPTHS = [1, 20, 60]
ROUNDS = int(os.environ.get("ROUNDS", "15"))
PAIRS = int(os.environ.get("PAIRS", "20000"))


def at_depth(depth, function):
    return function() if depth <= 1 else at_depth(depth - 1, function)


def child(kind, read, write):
    if kind != "memtrace":
        os.environ.pop("MEMTRACE_SESSION", None)
    import torch

    torch.empty(1000, device="cuda")
    if kind in ("python", "all"):
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks=kind)

    def pairs():
        empty = torch.empty
        start = time.perf_counter_ns()
        for _ in range(PAIRS):
            empty(1000, device="cuda")
        return (time.perf_counter_ns() - start) / PAIRS

    for depth in DEPTHS:
        at_depth(depth, pairs)
    os.write(write, b"r")
    while True:
        command = os.read(read, 1)
        if command in (b"", b"q"):
            os._exit(0)
        depth = DEPTHS[command[0] - 48]
        os.write(write, json.dumps(at_depth(depth, pairs)).encode().ljust(64))


children = {}
for kind in KINDS:
    to_child, from_child = os.pipe(), os.pipe()
    if os.fork() == 0:
        child(kind, to_child[0], from_child[1])
    children[kind] = (to_child[1], from_child[0])
    os.read(from_child[0], 1)

samples = {(kind, depth): [] for kind in KINDS for depth in DEPTHS}
for _ in range(ROUNDS):
    for index, depth in enumerate(DEPTHS):
        for kind, (write, read) in children.items():
            os.write(write, bytes([48 + index]))
            samples[kind, depth].append(json.loads(os.read(read, 64)))
for write, _ in children.values():
    os.write(write, b"q")
for _ in children:
    os.wait()
out = []
for depth in DEPTHS:
    row = {kind: statistics.median(samples[kind, depth]) for kind in KINDS}
    added = {kind: row[kind] - row["plain"] for kind in KINDS[1:]}
    row["added_ratio_to_python"] = added["memtrace"] / added["python"] if added["python"] > 0 else None
    row["added_ratio_to_all"] = added["memtrace"] / added["all"] if added["all"] > 0 else None
    out.append({"depth": depth, **row})
json.dump({"pairs": PAIRS, "rounds": ROUNDS, "unit": "ns per torch.empty + free", "results": out}, sys.stdout, indent=1)
print()
