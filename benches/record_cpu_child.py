"""The measured processes of CPU tensors in `record`: runs under `memtrace --cpu always`, prints the samples as JSON."""

import contextlib
import json
import sys
import time

import frame
import turns

KINDS = ["off", "memtrace", "profiler", "memray"]
DEPTH = 20
ROUNDS = 3 if frame.QUICK else 31
ITERATIONS = {"empty": 1000 if frame.QUICK else 5000, "ops": 50 if frame.QUICK else 200}
LOOPS = {"empty": "torch.empty(1000) and its free", "ops": "20 operations on 1000 elements each"}


def recorder(kind):
    """The peer as a context manager; entering and leaving it is not measured."""
    if kind == "profiler":
        from torch.profiler import ProfilerActivity, profile

        return profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
    if kind == "memray":
        import memray

        return memray.Tracker(destination=memray.FileDestination(frame.SCRATCH / "memray.bin", overwrite=True))
    return contextlib.nullcontext()


def prepare(kind):
    import torch

    torch.set_num_threads(1)
    x = torch.ones(1000)

    def empty(iterations):
        make = torch.empty
        for _ in range(iterations):
            make(1000)

    def ops(iterations):
        with torch.no_grad():
            for _ in range(iterations):
                y = x
                for _ in range(10):
                    y = torch.relu(y + x)

    def at_depth(depth, loop, iterations):
        if depth > 1:
            return at_depth(depth - 1, loop, iterations)
        loop(10)
        start = time.perf_counter_ns()
        loop(iterations)
        return (time.perf_counter_ns() - start) / iterations

    def work(name):
        with recorder(kind):
            return at_depth(DEPTH, {"empty": empty, "ops": ops}[name], ITERATIONS[name])

    return work


def main():
    kinds = KINDS
    try:
        import memray

        versions = {"memray": memray.__version__}
    except ImportError:
        kinds, versions = KINDS[:-1], {}
    taking = turns.Forked(kinds, prepare)
    found = []
    for name, title in LOOPS.items():
        turns.rounds(taking, kinds, 1, name)
        found.append({"loop": title, "samples": turns.rounds(taking, kinds, ROUNDS, name)})
        frame.say(f"record, CPU tensors: {title}")
    taking.close()
    json.dump({"versions": versions, "loops": found}, sys.stdout)


main()
