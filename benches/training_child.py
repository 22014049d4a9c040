"""The measured process of `training`: takes METHOD and MODEL as its arguments, runs under memtrace, prints the samples
as JSON."""

import json
import sys
import time

import frame
import models
import turns

ROUNDS = 3 if frame.QUICK else 25 if frame.GPU else 101
# A block has as many steps as take about this long. On shared cores, many short blocks are better.
BLOCK_S = 0.06 if frame.GPU else 0.01 if frame.QUICK else 0.02
WARM_UP = 3


def main():
    method, model = sys.argv[1:]
    import torch

    def prepare(kind):
        step = models.make(model, torch)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        turns.record(torch, kind)

        def work(steps):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / steps

        return work

    taking = turns.METHODS[method](turns.KINDS, prepare)
    for _ in range(2):
        one = min(taking("off", 2) for _ in range(2))
    steps = max(1, round(BLOCK_S / one))
    turns.rounds(taking, turns.KINDS, 1, steps)
    samples = turns.rounds(taking, turns.KINDS, ROUNDS, steps)
    taking.close()
    json.dump({"steps": steps, "samples": samples}, sys.stdout)


main()
