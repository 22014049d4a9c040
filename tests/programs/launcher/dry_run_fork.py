"""The way of an inference server: the parent asks NVML for everything that it must know of the GPUs, and forks a process that uses
CUDA. Prints as JSON what both found.
"""

import ctypes
import json
import multiprocessing
import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch


def nvml_figures():
    """The figures of the first GPU, through the functions that nvidia-ml-py calls."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    assert nvml.nvmlInit_v2() == 0
    device, count = ctypes.c_void_p(), ctypes.c_uint()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetName(device, name, 96) == nvml.nvmlDeviceGetUUID(device, uuid, 96) == 0
    major, minor, node = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    assert nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    assert nvml.nvmlDeviceGetNumaNodeId(device, ctypes.byref(node)) == 0
    memory = (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    linked, link = ctypes.c_int(), ctypes.c_uint()
    assert nvml.nvmlDeviceGetP2PStatus(device, device, 2, ctypes.byref(linked)) == 0
    link_status = nvml.nvmlDeviceGetNvLinkState(device, 0, ctypes.byref(link))
    level = ctypes.c_int(-1)
    assert nvml.nvmlDeviceGetTopologyCommonAncestor(device, device, ctypes.byref(level)) == 0
    return {
        "count": count.value,
        "name": name.value.decode(),
        "capability": [major.value, minor.value],
        "total": memory[0],
        "has_nvlink": linked.value == 0 and link_status == 0 and link.value == 1,
        "level": level.value,
        "has_unknown": hasattr(nvml, "nvmlDeviceGetSomethingNew"),
    }


def child(queue):
    torch.cuda.set_device(0)
    block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    capability = torch.cuda.get_device_capability()
    queue.put({"capability": capability, "allocated": torch.cuda.memory_allocated(), "sum": int(block.numel())})


found = {"devices": torch.cuda.device_count(), "is_available": torch.cuda.is_available(), "nvml": nvml_figures()}
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=child, args=(queue,))
process.start()
process.join()
found["exit"] = process.exitcode
found["child"] = queue.get() if process.exitcode == 0 else None
print(json.dumps(found))
