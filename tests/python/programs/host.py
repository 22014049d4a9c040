"""CPU tensors have figures too."""

import gpu_memtrace
import torch

kept = torch.zeros(1 << 20)
with gpu_memtrace.annotate("host"):
    more = torch.zeros(1 << 18)
memory = gpu_memtrace.current()
assert memory[-1].allocated_bytes == (4 << 20) + (1 << 20), memory
assert memory.allocated_bytes == 0, "the sum is that of GPUs"
report = gpu_memtrace.tensors()
assert report["cpu"].used_bytes == (4 << 20) + (1 << 20), str(report)
print("done")
