"""The measured process of `record` and `native`: takes METHOD and KINDS (separated by commas) as its arguments, runs
under memtrace, prints the samples as JSON."""

import _thread
import json
import queue
import sys
import time

import frame
import turns

DEPTHS = [1, 20, 60]
THREADS = [1, 4, 16]
# Many short turns: the median then ignores other work of the machine.
PAIRS = 2000 if frame.QUICK else 4000


def pairs_of(threads):
    """The number of pairs of each thread, large enough that threads run at the same time."""
    return max(PAIRS // threads, 500)


def rounds(threads):
    if frame.QUICK:
        return 3
    return (31 if threads == 1 else 15) if frame.GPU else (101 if threads == 1 else 51)


class Workers:
    """Threads that wait at a stack depth; the depth counts the thread's whole Python stack."""

    def __init__(self, torch):
        self.torch, self.empty, self.ends = torch, torch.empty, queue.SimpleQueue()
        self.inboxes = {depth: [queue.SimpleQueue() for _ in range(max(THREADS))] for depth in DEPTHS}
        for depth, inboxes in self.inboxes.items():
            for inbox in inboxes:
                _thread.start_new_thread(self.loop, (inbox, depth))

    def loop(self, inbox, depth):
        """Calls itself down to `depth` frames and measures there."""
        if depth > 1:
            return self.loop(inbox, depth - 1)
        empty, clock, ends = self.empty, time.perf_counter_ns, self.ends
        # A thread that never set its device pays 5 us more a pair (CUDA 13.0, H200): CUDA looks up its context each
        # time.
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
            # Warm-up: afterwards stacks are known, PyTorch's unwinder has seen every frame, and its event ring is full.
            turns.rounds(taking, kinds, 1 if frame.QUICK else 3, threads, depth)
            samples = turns.rounds(taking, kinds, rounds(threads), threads, depth)
            found.append({"threads": threads, "depth": depth, "samples": samples})
            frame.say(f"record, {taking.about}: {threads} threads, depth {depth}")
    taking.close()
    pairs = sum(threads * pairs_of(threads) for kind, (threads, _) in taking.done if kind in turns.STACKS)
    json.dump({"pairs": pairs, "found": found}, sys.stdout)


main()
