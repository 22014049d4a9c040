"""Annotations of every kind of function. Each allocates a different number of KiB, so that the report tells them apart."""

import asyncio
import inspect
import threading

import gpu_memtrace
import torch
from gpu_memtrace import annotate

KEPT = []


def allocate(kib: int) -> torch.Tensor:
    tensor = torch.empty(kib << 10, dtype=torch.uint8, device="cuda")
    KEPT.append(tensor)
    return tensor


with annotate("first"):
    # The range begins before the first event of the process.
    allocate(2)


@annotate("function")
def function(kib: int, *, more: int = 0) -> int:
    """Has a docstring."""
    allocate(kib + more)
    return kib


@annotate("recursive")
def recursive(depth: int) -> None:
    allocate(16)
    if depth:
        recursive(depth - 1)


@annotate("generator")
def generator(count: int):
    received = []
    try:
        for i in range(count):
            allocate(4)
            received.append((yield i))
    except KeyError:
        allocate(64)
        yield "thrown"
    finally:
        allocate(128)
    return received


@annotate("coroutine")
async def coroutine(kib: int) -> int:
    allocate(kib)
    await asyncio.sleep(0)
    allocate(kib)
    return kib


@annotate("async generator")
async def async_generator(count: int):
    for i in range(count):
        allocate(8)
        sent = yield i
        assert sent is None
        await asyncio.sleep(0)


class Model:
    @annotate("method")
    def method(self) -> None:
        allocate(32)

    @classmethod
    @annotate("class method")
    def make(cls) -> "Model":
        allocate(32)
        return cls()


assert function.__name__ == "function" and function.__doc__ == "Has a docstring."
assert function(3, more=1) == 3
recursive(2)
assert inspect.isgeneratorfunction(generator) and inspect.iscoroutinefunction(coroutine)
assert inspect.isasyncgenfunction(async_generator)

# The consumer's allocations are not the generator's.
running = generator(2)
assert next(running) == 0
allocate(512)
assert running.send("a") == 1
try:
    running.send("b")
except StopIteration as end:
    assert end.value == ["a", "b"]
running = generator(3)
next(running)
assert running.throw(KeyError()) == "thrown"
running.close()
abandoned = generator(3)
next(abandoned)
abandoned.close()


async def main() -> None:
    async def other() -> None:
        allocate(512)

    # The other task runs while the coroutine waits, and is not its part.
    result, _ = await asyncio.gather(coroutine(1), other())
    assert result == 1
    assert [i async for i in async_generator(3)] == [0, 1, 2]


asyncio.run(main())
Model.make().method()

try:
    with annotate("failing"):
        allocate(1)
        raise ValueError
except ValueError:
    pass

outer, inner = annotate("outer"), annotate("inner")
outer.__enter__()
with inner:
    allocate(1)
# Ranges need not nest.
inner.__enter__()
allocate(1)
outer.__exit__(None, None, None)
allocate(1)
inner.__exit__(None, None, None)

same = annotate("same object")
with same:
    with same:
        allocate(2)


def work() -> None:
    with annotate("thread"):
        allocate(2)


threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

with annotate("name with \0 and \udcff and " + "x" * 5000):
    allocate(2)
with gpu_memtrace.paused(), annotate("paused"):
    allocate(2)
assert gpu_memtrace.is_recording()
with gpu_memtrace.paused():
    assert not gpu_memtrace.is_recording()
    with gpu_memtrace.paused():
        pass
    assert not gpu_memtrace.is_recording()
gpu_memtrace.pause()
gpu_memtrace.resume()
assert gpu_memtrace.is_recording()
print("done")
