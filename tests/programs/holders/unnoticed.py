"""Prints what a program can see of its own objects while memtrace searches them."""
import gc
import sys

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


def references():
    return [sys.getrefcount(thing) for thing in (items, items[0], table, None, held, sys.modules)][:3] + [
        sys.getrefcount(held)
    ]


held = torch.ones(256, 1024, device="cuda")
items = [Item(torch.ones(256, 1024, device="cuda")) for _ in range(4)]
table = Tensors(a=torch.ones(256, 1024, device="cuda"))
parameter = torch.nn.Parameter(torch.ones(256, 1024, device="cuda"))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    (parameter * 2).sum().backward()
    before = len(gc.get_objects())
    optimizer.step()
    after = len(gc.get_objects())
    if step in (2, 3, 5, 8, 12, 39):
        print(step, after - before, references(), gc.get_count()[2], gc.isenabled(), len(gc.garbage))
