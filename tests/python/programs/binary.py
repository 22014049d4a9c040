"""The program memtrace is found on PATH if nothing else names it."""

import gpu_memtrace
import torch

kept = torch.zeros(1 << 18, device="cuda")
try:
    print(gpu_memtrace.current()[0].allocated_bytes)
except gpu_memtrace.RecordingError as error:
    print(error)
