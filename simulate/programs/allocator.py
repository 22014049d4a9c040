"""Two devices, peer copies, streams, record_stream, empty_cache and page-locked memory, with every allocator backend."""
import os

import torch

MIB = 1 << 20
native = torch.cuda.get_allocator_backend() == "native"
slow = float(os.environ.get("SIMCUDA_KERNEL_US", "0")) > 0
expected = "cudaMallocAsync" if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "native"
assert torch.cuda.get_allocator_backend() == expected
assert torch.cuda.device_count() == 2
TENSOR = 16 * MIB * 4


def used(device=0):
    free, total = torch.cuda.mem_get_info(device)
    return total - free


for device in range(2):
    a = torch.empty(10 * MIB, device=f"cuda:{device}")
    assert torch.cuda.memory_allocated(device) == 40 * MIB
    if native:
        assert used(device) == torch.cuda.memory_reserved(device) >= 40 * MIB
    del a

on_0 = torch.arange(1000).cuda(0)
on_1 = on_0.to("cuda:1")
assert torch.equal(on_1.cpu(), torch.arange(1000)), "a copy from device to device"
with torch.cuda.device(1):
    b = torch.empty(MIB, device="cuda")
    assert b.device.index == torch.cuda.current_device() == 1
assert torch.cuda.current_device() == 0

side = torch.cuda.Stream()
x = torch.empty(16 * MIB, device="cuda")
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
with torch.cuda.stream(side):
    start.record()
    for _ in range(50):
        y = x + 1
    end.record()
    x.record_stream(side)
assert side.query() != slow
before = torch.cuda.memory_allocated()
del x
active = torch.cuda.memory_stats().get("active_bytes.all.current")
if native:
    kept = active - torch.cuda.memory_allocated()
    assert kept == (TENSOR if slow else 0) or not slow, "record_stream defers the free while the stream is busy"
    assert before - torch.cuda.memory_allocated() == TENSOR
torch.cuda.synchronize()
side.synchronize()
assert side.query()
elapsed = start.elapsed_time(end)
assert elapsed >= (4.9 if slow else 0), f"50 launches of 100 us took {elapsed} ms"
w = torch.empty(16 * MIB, device="cuda")
if native:
    live = torch.cuda.memory_stats()["active_bytes.all.current"]
    assert live == torch.cuda.memory_allocated(), "the deferred free was made good"
del w, y
torch.cuda.synchronize()
torch.cuda.empty_cache()
if native:
    assert used() == torch.cuda.memory_reserved() <= 2 * 20 * MIB, torch.cuda.memory_reserved()
    for segment in torch.cuda.memory_snapshot():
        assert segment["address"] % 512 == 0 and segment["allocated_size"] <= segment["total_size"]
        expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        assert segment["is_expandable"] == expandable

pinned = torch.arange(MIB, dtype=torch.float32).pin_memory()
assert pinned.is_pinned() and not torch.empty(3).is_pinned()
assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned)
