"""Eight threads that allocate at once, without a GIL. Each allocation keeps the stack that `traceback.walk_stack` sees
beside it. Prints, for each size in bytes, that stack as lines `function:line`, innermost first."""

import sys
import threading
import traceback

import torch

assert not sys._is_gil_enabled()
ROUNDS = 300
seen = {}


def allocate(size):
    # Both calls are on one line, so the line is the same.
    kept, stack = torch.empty(size, dtype=torch.uint8, device="cuda"), list(traceback.walk_stack(sys._getframe()))
    seen.setdefault(size, set()).add(tuple(f"{frame.f_code.co_name}:{line}" for frame, line in stack))
    return kept


def descend(depth, size):
    if depth == 0:
        return allocate(size)
    return descend(depth - 1, size)


def in_generator(depth, size):
    yield descend(depth, size)


def allocate_often(number, barrier):
    barrier.wait()
    for round_ in range(ROUNDS):
        size = (1 + number * 2 + round_ % 2) * 512
        if round_ % 2:
            descend(number, size)
        else:
            next(in_generator(number, size))


barrier = threading.Barrier(8)
threads = [threading.Thread(target=allocate_often, args=(number, barrier)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
model(torch.ones(64, 512, device="cuda")).sum().backward()
for size, stacks in sorted(seen.items()):
    assert len(stacks) == 1, stacks
    print(size, *stacks.pop())
