"""Prints what a program can see of its own objects while memtrace searches them."""
import gc
import sys

import settle_autograd
import torch

gc.collect()
gc.disable()


class Item:
    def __init__(self, value):
        self.value = value

    @property
    def shown(self):
        print("a property ran")

    def __getattr__(self, name):
        print("looked up", name)
        raise AttributeError(name)


class Tensors(dict):
    def __getitem__(self, key):
        print("an item was read")
        return super().__getitem__(key)

    def items(self):
        print("items were listed")
        return super().items()


class Key:
    """A key of a dictionary whose methods print."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __hash__(self):
        print("a key was hashed")
        return 1

    def __eq__(self, other):
        print("keys were compared")
        return self is other


def fail():
    state = torch.ones(256, 1024, device="cuda")
    raise ValueError(len(state))


def default(value=torch.ones(256, 1024, device="cuda")):
    return value


def make_closure():
    captured = torch.ones(256, 1024, device="cuda")
    return lambda: captured


def references():
    return [sys.getrefcount(thing) for thing in (items, items[0], table, None, held, sys.modules)][:3] + [
        sys.getrefcount(held)
    ]


held = torch.ones(256, 1024, device="cuda")
items = [Item(torch.ones(256, 1024, device="cuda")) for _ in range(4)]
table = Tensors(a=torch.ones(256, 1024, device="cuda"))
keys = {Key(torch.ones(256, 1024, device="cuda")): 1, Key(torch.ones(256, 1024, device="cuda")): 2}
closure = make_closure()
try:
    fail()
except ValueError as raised:
    error = raised
# Reading some attributes of functions, generators and tracebacks calls the hooks of `sys.addaudithook`.
sys.addaudithook(lambda event, arguments: print(event, arguments[-1]) if event == "object.__getattr__" else None)
parameter = torch.nn.Parameter(torch.ones(256, 1024, device="cuda"))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    (parameter * 2).sum().backward()
    # The autograd thread frees objects after the call.
    settle_autograd.settle()
    before = len(gc.get_objects())
    optimizer.step()
    after = len(gc.get_objects())
    if step in (2, 3, 5, 8, 12, 39):
        print(step, after - before, references(), gc.get_count()[2], gc.isenabled(), len(gc.garbage))
