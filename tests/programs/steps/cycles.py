"""Blocks that are freed by reference counts, and blocks that only the cyclic garbage collector frees. Prints the sizes
of each kind as JSON; no two sizes are equal."""

import gc
import json
import threading

import torch

torch.empty(64, device="cuda")


class Node:
    """A tensor in a cycle."""

    def __init__(self, size):
        self.tensor = torch.empty(size, device="cuda")
        self.me = self


def sizes(tensors):
    return [t.numel() * t.element_size() for t in tensors]


def free_elsewhere(tensors):
    """Frees the tensors on another thread than the collector's."""
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()


gc.disable()
gc.collect()
plain = [torch.empty(1000 + i, device="cuda") for i in range(5)]
by_hand = sizes(plain)
plain.clear()
cycles = [Node(5000 + i) for i in range(7)]
by_collector = sizes(node.tensor for node in cycles)
cycles.clear()
gc.collect()
# The collector runs by itself, at its thresholds.
gc.enable()
gc.set_threshold(50, 2, 2)
node = Node(30000)
by_collector += sizes([node.tensor])
del node
junk = [[] for _ in range(2000)]
gc.disable()
others = [torch.empty(40000, device="cuda")]
by_hand += sizes(others)
free_elsewhere(others)
print(json.dumps({"hand": by_hand, "collector": by_collector}))
