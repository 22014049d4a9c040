"""The line profiler on functions of every kind. The end is that of the arguments: a return, an exception or Ctrl+C."""

import asyncio
import os
import signal
import sys
import threading
import time

import gpu_memtrace
import torch
from gpu_memtrace import profile, profile_every, set_target_gpu

KEPT = []


def allocate(kib, device="cuda"):
    KEPT.append(torch.empty(kib << 10, dtype=torch.uint8, device=device))


@profile(columns=["allocated_bytes.all.diff"])
def plain():
    allocate(2)
    # a comment


class Model(torch.nn.Module):
    @profile(columns=["allocated_bytes.all.diff"])
    def forward(self, x):
        allocate(4)
        return x

    @classmethod
    @profile(columns=["allocated_bytes.all.diff"])
    def make(cls):
        allocate(8)
        return cls()


@profile(columns=["allocated_bytes.all.diff", "allocation.all.allocated"])
def generator():
    for _ in range(3):
        allocate(16)
        yield


@profile(columns=["allocated_bytes.all.diff"])
async def coroutine():
    allocate(32)
    await asyncio.sleep(0)
    allocate(64)


@profile_every(2, columns=["allocated_bytes.all.diff"])
def every():
    allocate(128)


@profile_every(1, enable=False)
def disabled():
    allocate(1)


@profile
def devices():
    allocate(256, "cuda:0")
    allocate(512, "cuda:1")


@profile
def unused():
    pass


code = plain.__code__
assert sys.gettrace() is None, "nothing traces the program"
plain()
Model.make()(1)
for _ in generator():
    allocate(1024)
asyncio.run(coroutine())
for _ in range(3):
    every()
disabled()
threads = [threading.Thread(target=plain) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if "targets" in sys.argv:
    set_target_gpu(torch.device("cuda:1"))
devices()

with gpu_memtrace.LineProfiler(devices) as first:
    devices()
second = gpu_memtrace.LineProfiler(devices, target_gpu=1)
devices()
second.enable()
devices()
second.disable()
devices()
for profiler, count in ((first, 2), (second, 1)):
    tables = profiler.display().tables
    assert [table.device for table in tables] == [0, 1][-count:], tables
    for table in tables:
        (figures,) = table.figures.values()
        assert figures.times == 1 and figures.allocated_bytes == [256, 512][table.device] << 10, table
        assert "<table>" in profiler.display()._repr_html_()
first.clear()
assert not first.display().tables and not first.enabled
for columns in (["active_bytes"], ["nothing.all.peak"], ["active_bytes.all.most"]):
    try:
        profile(plain, columns)
    except ValueError as error:
        assert "torch.cuda.memory_stats" in str(error)
    else:
        raise AssertionError(columns)
assert plain.__code__ is code and sys.gettrace() is None
print("end of the program", flush=True)
if "exception" in sys.argv:
    raise RuntimeError("on purpose")
if "interrupt" in sys.argv:
    # A shell starts background jobs with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
