"""Another library than PyTorch requests memory that CUDA refuses.

cached: PyTorch keeps what the library needs in its cache. The program continues.
served: as `cached`, and the library asks again after torch.cuda.empty_cache().
smaller: the library asks for ever less at the same place, until it gets it.
fatal: PyTorch's tensors leave too little, and the program ends with the error.
pinned: page-locked host memory is refused.

Run with SIMCUDA_MEMORY=8G. The library is the driver itself, through ctypes. Prints the free bytes of the device after the
refusal, as cuMemGetInfo has them.
"""

import ctypes
import sys

import torch

GIB = 1 << 30
torch.cuda.init()
driver = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line))


def request(size):
    pointer = ctypes.c_void_p()
    return driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))


def request_pinned(size):
    pointer = ctypes.c_void_p()
    return driver.cuMemAllocHost_v2(ctypes.byref(pointer), ctypes.c_size_t(size))


def main(what):
    kept = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    if what == "pinned":
        assert request_pinned(1 << 60) != 0
        return kept
    cached = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
    if what == "fatal":
        assert request(5 * GIB) == 0, "CUDA out of memory"
    del cached
    if what == "smaller":
        results = [request(size * GIB) for size in (6, 5, 4, 2)]
        assert results == [2, 2, 2, 0], results
        return kept
    assert request(5 * GIB) == 2
    print(torch.cuda.mem_get_info()[0])
    if what == "served":
        torch.cuda.empty_cache()
        assert request(5 * GIB) == 0
    kept = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    return kept


held = main(sys.argv[1])
