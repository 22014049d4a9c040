"""The measured process of `record` and `native`: METHOD and KINDS (with commas) as its arguments, runs under memtrace, prints the samples
as JSON."""

import _thread
import json
import queue
import sys
import time

import frame
import turns

DEPTHS = [1, 20, 60]
THREADS = [1, 4, 16]
# Short turns and many of them: a median shrugs off what else the machine does.
PAIRS = 2000 if frame.QUICK else 4000


def pairs_of(threads):
    """Of each thread, so many that threads meet each other."""
    return max(PAIRS // threads, 500)


def rounds(threads):
    if frame.QUICK:
        return 3
    return (31 if threads == 1 else 15) if frame.GPU else (101 if threads == 1 else 51)


class Workers:
    """Threads that wait at a stack depth; a thread's whole Python stack is as deep as said."""

    def __init__(self, torch):
        self.torch, self.empty, self.ends = torch, torch.empty, queue.SimpleQueue()
        self.inboxes = {depth: [queue.SimpleQueue() for _ in range(max(THREADS))] for depth in DEPTHS}
        for depth, inboxes in self.inboxes.items():
            for inbox in inboxes:
                _thread.start_new_thread(self.loop, (inbox, depth))

    def loop(self, inbox, depth):
        """Goes down to `depth` frames and measures there."""
        if depth > 1:
            return self.loop(inbox, depth - 1)
        empty, clock, ends = self.empty, time.perf_counter_ns, self.ends
        # A thread that has never named its device pays 5 us more a pair (CUDA 13.0, H200): CUDA looks for its context each time.
        self.torch.cuda.set_device(0)
        while True:
            pairs = inbox.get()
            start = clock()
            for _ in range(pairs):
                empty(1000, device="cuda")
            ends.put((start, clock()))

    def __call__(self, threads, depth):
        pairs = pairs_of(threads)
        for inbox in self.inboxes[depth][:threads]:
            inbox.put(pairs)
        spans = [self.ends.get() for _ in range(threads)]
        return (max(end for _, end in spans) - min(start for start, _ in spans)) / (pairs * threads)


def main():
    method, kinds = sys.argv[1], sys.argv[2].split(",")
    import torch

    def prepare(kind):
        torch.empty(1000, device="cuda")
        turns.record(torch, kind)
        return Workers(torch)

    taking = turns.METHODS[method](kinds, prepare)
    found = []
    for threads in THREADS:
        for depth in DEPTHS:
            # Warm: stacks known, PyTorch's unwinder has seen every frame, its ring of events is full.
            turns.rounds(taking, kinds, 1 if frame.QUICK else 3, threads, depth)
            samples = turns.rounds(taking, kinds, rounds(threads), threads, depth)
            found.append({"threads": threads, "depth": depth, "samples": samples})
            frame.say(f"record, {taking.about}: {threads} threads, depth {depth}")
    taking.close()
    pairs = sum(threads * pairs_of(threads) for kind, (threads, _) in taking.done if kind in turns.STACKS)
    json.dump({"pairs": pairs, "found": found}, sys.stdout)


main()
