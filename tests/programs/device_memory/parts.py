"""Allocates memory of each kind on a GPU, and prints what the driver and PyTorch report at the end.

RUN_FOLDER names memtrace's run folder. The program waits there for the first sample of NVML, which has to be older than the
program's use of the GPU.
"""
import json
import os
import time

import torch

MIB = 1 << 20


def wait_for_sample(text):
    for _ in range(6000):
        try:
            with open(os.path.join(os.environ["RUN_FOLDER"], "nvml.jsonl")) as lines:
                if text in lines.read():
                    return
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"no sample of NVML with {text}")


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


if "RUN_FOLDER" in os.environ:
    wait_for_sample('"sample"')
torch.cuda.init()
torch.cuda.current_stream()
first = torch.empty(16, device="cuda")
report = {"after_first_allocation": used()}
first.add_(1)
matrix = torch.randn(512, 512, device="cuda")
product = matrix @ matrix
pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
# Makes the last reading: this is more than memtrace lets pass without one.
large = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
report |= {"used": used(), "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
if "SIMCUDA_MIG" in os.environ:
    # The samples have the instance of this process.
    wait_for_sample(f'"pid":{os.getpid()},"bytes"')
# The end by _exit writes no buffer.
print(json.dumps(report), flush=True)
os._exit(0)
