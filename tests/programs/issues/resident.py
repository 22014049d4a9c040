"""A model and managed memory that fill most of a GPU, whose driver could take memory of the host."""
# issue: none
# env: SIMCUDA_MEMORY=512M SIMCUDA_SPILL=1
import ctypes

import torch
import torch.nn as nn

torch.cuda.init()
with open("/proc/self/maps") as maps:
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "/libcudart" in line))
address = ctypes.c_void_p()
assert runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(64 << 20), ctypes.c_uint(1)) == 0
model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(5)]).cuda()
with torch.no_grad():
    for batch in torch.randn(3, 8, 4096, device="cuda"):
        print(model(batch).shape)
runtime.cudaFree(address)
