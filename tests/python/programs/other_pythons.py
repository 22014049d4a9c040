"""The package in a Python without PyTorch. The process allocates nothing on a GPU."""

import asyncio
import sys

import gpu_memtrace
import gpu_memtrace.memlab


@gpu_memtrace.annotate("generator")
def generator():
    yield 1
    return 2


@gpu_memtrace.annotate("coroutine")
async def coroutine():
    await asyncio.sleep(0)
    return 3


@gpu_memtrace.annotate("async generator")
async def async_generator():
    yield 4


async def main():
    assert await coroutine() == 3
    assert [i async for i in async_generator()] == [4]


@gpu_memtrace.profile_every(1)
def function():
    return 5


assert gpu_memtrace.is_recording()
assert list(generator()) == [1]
asyncio.run(main())
assert len(gpu_memtrace.current()) == 0 and gpu_memtrace.lines(function) == []
assert len(gpu_memtrace.tensors().devices) == 0
with gpu_memtrace.LineProfiler(function) as profiler:
    pass
assert "neither allocated nor freed" in str(profiler.display())
gpu_memtrace.memlab.MemReporter().report()
assert "torch" not in sys.modules
print("done") if sys.version_info >= (3, 9) else sys.exit("Python 3.9 is needed")
