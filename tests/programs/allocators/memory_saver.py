"""torch_memory_saver: pauses and resumes tensors, whose memory it maps itself. The argument is its hook mode."""

import os
import sys

import torch
from torch_memory_saver import torch_memory_saver

torch_memory_saver.hook_mode = sys.argv[1]


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


ordinary = torch.zeros(1_000_000, dtype=torch.uint8, device="cuda")
with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.zeros(100 << 20, dtype=torch.uint8, device="cuda")
with torch_memory_saver.region(tag="kv_cache"):
    cache = torch.zeros(200 << 20, dtype=torch.uint8, device="cuda")
addresses = weights.data_ptr(), cache.data_ptr()
before = used()
torch_memory_saver.pause()
paused = used()
torch_memory_saver.resume("weights")
print("paused", before - paused, "resumed", used() - paused)
torch_memory_saver.resume("kv_cache")
print("used", used() - before, "same addresses", addresses == (weights.data_ptr(), cache.data_ptr()))
torch_memory_saver.pause("kv_cache")
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
# In its mode `torch`, version 0.0.10 ends the process with an error when it frees tensors outside a region.
sys.stdout.flush()
os._exit(0)
