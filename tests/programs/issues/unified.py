"""A table of features in managed memory, which is larger than the GPU."""
# issue: spilled-to-host
# env: SIMCUDA_MEMORY=512M
import ctypes

import torch

torch.cuda.init()
with open("/proc/self/maps") as maps:
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "/libcudart" in line))


def managed(size):
    address = ctypes.c_void_p()
    status = runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))  # issue here
    assert status == 0, status
    return address


weights = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
features = managed(768 << 20)
for step in range(3):
    print(float(weights[step]))
runtime.cudaFree(features)
