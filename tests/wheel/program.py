"""Allocates GPU memory by ctypes: 3 MiB and 5 MiB at once, then frees the first."""

import ctypes

runtime = ctypes.CDLL("libcudart.so.12")


def allocates(size):
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    return pointer


first = allocates(3 << 20)
second = allocates(5 << 20)
assert runtime.cudaFree(first) == 0
