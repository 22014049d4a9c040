"""Compares the peak inside named ranges with PyTorch's own, which is reset at their start."""

import threading

import gpu_memtrace
import torch

MIB = 1 << 20


def block(mib: int, device: str = "cuda:0") -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


# A range that starts before the first use of CUDA.
with gpu_memtrace.annotate("first"):
    kept = block(3)
assert gpu_memtrace.peak(within="first")[0].allocated_bytes == 3 * MIB

# A peak from before the range does not count. What was allocated before does.
del kept
kept = [block(5)]
block(64)
torch.cuda.reset_peak_memory_stats()
with gpu_memtrace.annotate("part"):
    block(7)
    kept.append(block(1))
    # A range that is still open ends now.
    assert gpu_memtrace.peak(within="part")[0].allocated_bytes == torch.cuda.max_memory_allocated() == 12 * MIB
    with gpu_memtrace.annotate("inner"):
        block(2)
    assert gpu_memtrace.peak(within="inner")[0].allocated_bytes == 8 * MIB
block(32)
assert gpu_memtrace.peak(within="part")[0].allocated_bytes == 12 * MIB

# The highest of all ranges of a name counts, on every thread and device by itself.
with gpu_memtrace.annotate("part"):
    thread = threading.Thread(target=block, args=(20,))
    thread.start()
    thread.join()
    other = block(2, "cuda:1")
found = gpu_memtrace.peak(within="part")
assert {number: memory.allocated_bytes for number, memory in found.items()} == {0: 26 * MIB, 1: 2 * MIB}
assert sum(found[0].by_category.values()) == 26 * MIB

# Two ranges of one name overlap: the time until the last one ends counts.
first, second = gpu_memtrace.annotate("overlap"), gpu_memtrace.annotate("overlap")
first.__enter__()
second.__enter__()
first.__exit__()
block(40)
second.__exit__()
block(80)
assert gpu_memtrace.peak(within="overlap")[0].allocated_bytes == 46 * MIB

# A range without any event has the memory at its start. Names are compared in full.
with gpu_memtrace.annotate("empty 1"):
    pass
assert gpu_memtrace.peak(within="empty 1")[0].allocated_bytes == 6 * MIB
for name in ("empty", "none"):
    try:
        gpu_memtrace.peak(within=name)
    except gpu_memtrace.RecordingError as error:
        assert f"no range named {name} on a device" in str(error), error
    else:
        raise AssertionError(f"the recording has no range {name}")

# A training step.
model, batch = torch.nn.Linear(512, 512).cuda(), torch.randn(64, 512, device="cuda")
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    with gpu_memtrace.annotate(f"step {step}"):
        model(batch).square().sum().backward()
        peak = torch.cuda.max_memory_allocated()
    memory = gpu_memtrace.peak(within=f"step {step}")[0]
    assert memory.allocated_bytes == peak == sum(memory.by_category.values())
    assert memory.by_category["parameter"] == 512 * 512 * 4 + 512 * 4
