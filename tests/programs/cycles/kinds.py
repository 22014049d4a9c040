"""Reference cycles of many kinds that hold tensors. Prints what a program can see; --cycles must not change it.

The program has its own callback, finalizer and weak references. `saving`: it saves garbage itself. `stored`: reading an
object's properties stores it. `cpu`: the tensors are on the CPU.
"""

import gc
import os
import sys
import weakref

import torch

case = sys.argv[1]
if "MEMTRACE_TEST_UMASK" in os.environ:
    # Run in another folder, with a umask that removes all permissions of new files.
    os.chdir("/")
    os.umask(int(os.environ["MEMTRACE_TEST_UMASK"], 8))
device = "cpu" if case == "cpu" else "cuda"
seen, events, stored = [], [], []


def callback(phase, info):
    seen.append((phase, info["generation"], len(gc.garbage)))


class Node:
    def __init__(self):
        self.data = torch.ones(64, 1024, device=device)
        self.children = [{"parent": self}]


class Slots:
    __slots__ = ("itself", "data", "__weakref__")


class Finalized:
    def __init__(self):
        self.itself, self.data = self, torch.ones(128, 512, device=device)

    def __del__(self):
        events.append("deleted")


class Broken(dict):
    """Calling a dict's `items` raises here."""

    def items(self):
        raise RuntimeError("broken")


class Sneaky:
    def __init__(self):
        self.itself, self.data = self, torch.ones(512, 512, device=device)

    @property
    def cell_contents(self):
        return None

    @property
    def __dict__(self):
        stored.append(self)
        return {}


def node():
    Node()


def slots():
    it = Slots()
    it.itself, it.data = it, torch.ones(256, 256, device=device)
    weakref.finalize(it, events.append, "finalized")


def finalized():
    Finalized()


def broken():
    it = Broken(data=torch.ones(256, 128, device=device))
    it["itself"] = it


def closure():
    data = torch.ones(128, 128, device=device)

    def inner():
        return inner, data


def exception():
    data = torch.ones(32, 512, device=device)
    try:
        raise ValueError("unlucky")
    except ValueError as error:
        kept = error
    return data.shape, kept is None


def proxy():
    it = Node()
    it.proxy = weakref.proxy(it)


gc.disable()
gc.collect()
gc.callbacks.append(callback)
first = torch.zeros(8, device=device)
del first
torch.zeros(8, device=device)
if case == "stored":
    Sneaky()
    gc.collect()
    print("stored", len(stored) > 0, all(type(it.data) is torch.Tensor for it in stored), gc.garbage, gc.get_debug())
    # An object may be shown, and stored, once more.
    for _ in range(3):
        del stored[:]
        gc.collect()
    print("freed", torch.cuda.memory_allocated())
elif case == "saving":
    gc.set_debug(gc.DEBUG_SAVEALL)
    node()
    gc.collect()
    print(gc.get_debug(), sum(isinstance(it, Node) for it in gc.garbage))
    gc.set_debug(0)
    gc.garbage.clear()
    print(gc.collect() > 0, torch.cuda.memory_allocated())
else:
    for make in (node, slots, finalized, broken, closure, exception, proxy, node, node):
        make()
        found = gc.collect()
        left = torch.cuda.memory_allocated() if device == "cuda" else 0
        print(make.__name__, found, left, gc.garbage, gc.get_debug(), events, seen)
        seen.clear()
        events.clear()
print([getattr(it, "__name__", it) for it in gc.callbacks], gc.isenabled(), sys.exc_info())
