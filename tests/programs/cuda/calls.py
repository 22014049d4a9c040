"""CUDA by ctypes: loads a runtime and the driver, and calls both from nested Python functions."""
import ctypes
import sys
import threading

runtime = ctypes.CDLL(sys.argv[1])
driver = ctypes.CDLL("libcuda.so.1")


def allocate(size):
    pointer = ctypes.c_void_p()
    result = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer if result == 0 else result


def release(pointer):
    return runtime.cudaFree(pointer)


def work(size):
    pointers = [allocate(size + i) for i in range(5)]
    for pointer in pointers:
        assert release(pointer) == 0


work(1 << 20)
thread = threading.Thread(target=work, args=(2 << 20,))
thread.start()
thread.join()
print(allocate(1 << 50), release(ctypes.c_void_p(0x1234)))
pointer = ctypes.c_ulonglong()
assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(12345)) == 0
assert driver.cuMemFree_v2(pointer) == 0
print("done")
