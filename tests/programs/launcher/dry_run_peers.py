"""Prints whether GPUs access each other, the memory that a thread which waits for an event of GPU 1 takes on GPU 0, and folders of caches."""
import ctypes
import os
import threading

import torch

nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()


def used():
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    return memory[2]


before = used()
torch.cuda.set_device(1)
event = torch.cuda.Event()
event.record()
thread = threading.Thread(target=lambda: (event.query(), event.synchronize()))
thread.start()
thread.join()
folders = [os.environ[name] for name in ("VLLM_CACHE_ROOT", "SGLANG_CACHE_DIR")]
print(torch.cuda.can_device_access_peer(0, 1), used() - before, all(".simulated" in folder for folder in folders))
