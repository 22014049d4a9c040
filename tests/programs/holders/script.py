"""A script whose objects hold tensors in every way that a program does. The sizes tell the tensors apart."""
import collections
import dataclasses
import functools
import sys
import types

import torch

MIB = 1 << 18


def tensor(mib):
    return torch.ones(mib, MIB, device="cuda")


class Cache:
    entries = {}

    @classmethod
    def put(cls, key, value):
        cls.entries[key] = value


class State:
    def __init__(self):
        self.log = {"loss": []}


class Trainer:
    def __init__(self):
        self.state = State()
        self.best = None


if sys.version_info >= (3, 10):
    slots = dataclasses.dataclass(slots=True)
else:
    def slots(cls):
        names = tuple(cls.__annotations__)
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", *names)}
        return dataclasses.dataclass(type(cls.__name__, cls.__bases__, {**body, "__slots__": names}))


@slots
class Sample:
    image: object
    label: object


def make_counter():
    window = []

    def count(value):
        window.append(value)
        return len(window)

    return count


def batches(size):
    batch = tensor(size)
    while True:
        yield batch


def scale(value, by):
    return value * by


class Link:
    def __init__(self, next):
        self.next = next


def fail():
    state = tensor(23)
    raise ValueError(state.shape)


def hidden_function():
    hidden = types.ModuleType("hidden")
    exec("def use():\n    return kept", hidden.__dict__)
    hidden.kept = tensor(19)
    return hidden.use


history = [tensor(1) for _ in range(5)]
trainer = Trainer()
for _ in range(3):
    trainer.state.log["loss"].append(tensor(2))
trainer.best = tensor(3)
Cache.put("prompt", tensor(4))
recent = collections.deque([tensor(5), tensor(6)], maxlen=2)
sample = Sample(tensor(7), 1)
count = make_counter()
count(tensor(8))
loader = batches(9)
next(loader)
seen = {tensor(10)}
nested = ((1, [tensor(11)]), None)
halve = functools.partial(scale, by=tensor(12))
namespace = types.SimpleNamespace(weights={3: tensor(13)})
module = types.ModuleType("settings")
module.mask = tensor(14)
sys.modules["settings"] = module
weight = torch.nn.Parameter(tensor(15))
weight.grad = tensor(15)
chain = Link(tensor(17))
for _ in range(30_000):
    chain = Link(chain)
use = hidden_function()


def fallback(value=tensor(21)):
    return value


try:
    fail()
except ValueError as raised:
    error = raised
print("done", len(history))
