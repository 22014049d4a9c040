"""Allocates by the CUDA runtime, as CuPy and JAX do: nothing in it is of PyTorch."""

import ctypes

runtime = ctypes.CDLL("libcudart.so.12")


def allocate(size):
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    return pointer


kept = allocate(64 << 20)
for _ in range(6):
    result = allocate(8 << 20)
    assert runtime.cudaFree(result) == 0
