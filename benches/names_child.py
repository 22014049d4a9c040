"""The measured processes of `names`: takes LAYERS as its argument, runs under memtrace, prints the samples as JSON."""

import json
import sys
import time

import frame
import turns

# The last kind is the control: it shows the difference between two processes that do the same.
KINDS = ["memtrace", "memtrace-no-names", "again-memtrace-no-names"]
PROCESSES = 1 if frame.QUICK else 16
BLOCKS = 3 if frame.QUICK else 6
BLOCK_S = 0.1 if frame.QUICK else 0.5
FIRST = 3


def main():
    layers = int(sys.argv[1])
    width = 64 if layers < 1000 else 16
    import torch

    def prepare(kind):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            optimizer.zero_grad()
            model(torch.ones(8, width, device="cuda")).sum().backward()
            optimizer.step()

        def work(steps):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / steps

        return work

    fresh = {kind: [] for kind in KINDS}
    steps = None
    for number in range(PROCESSES):
        taking = turns.Forked(KINDS, prepare)
        # The first process finds the machine's caches colder, so each kind is first in turn.
        order = KINDS[number % len(KINDS):] + KINDS[:number % len(KINDS)]
        first = {kind: [] for kind in KINDS}
        began = time.perf_counter()
        for _ in range(FIRST):
            for kind in order:
                first[kind].append(taking(kind, 1))
        steps = steps or max(1, round(BLOCK_S / min(first[KINDS[1]])))
        samples = turns.rounds(taking, KINDS, BLOCKS, steps)
        whole = time.perf_counter() - began
        taking.close()
        for kind in KINDS:
            fresh[kind].append({"first_s": first[kind], "step_s": samples[kind], "whole_s": whole})
        frame.say(f"processes {number + 1} of {PROCESSES}")
    json.dump({"steps": steps, "fresh": fresh}, sys.stdout)


main()
