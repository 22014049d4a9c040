"""Memory that an engine gives back while it sleeps: the segments of a pool, which the CUDA driver maps, as vLLM does it.

PyTorch takes the two functions of such an allocator from a shared library. Here they are callbacks of ctypes.
"""

import ctypes

import torch

GRANULARITY = 2 << 20


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = [("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int)]


class CuMemAllocator:
    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.segments: dict = {}
        # Bytes that sleep() unmapped.
        self.unmapped = 0
        self.functions = (
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(self._allocate),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(self._free),
        )
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]
        # They are there until the process ends, as PyTorch frees the pool last of all.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        self.pool = torch.cuda.MemPool(self.allocator)

    def use(self):
        return torch.cuda.use_mem_pool(self.pool)

    def sleep(self) -> None:
        for addr, (size, handle) in self.segments.items():
            self._call("cuMemUnmap", ctypes.c_uint64(addr), ctypes.c_size_t(size))
            self._call("cuMemRelease", handle)
            self.unmapped += size

    def wake_up(self) -> None:
        self.segments = {addr: (size, self._map(addr, size)) for addr, (size, _) in self.segments.items()}
        self.unmapped = 0

    def _call(self, name: str, *arguments) -> None:
        result = getattr(self.driver, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} returned {result}")

    def _map(self, addr: int, size: int) -> ctypes.c_uint64:
        handle, where = ctypes.c_uint64(), ctypes.c_uint64(addr)
        prop = AllocationProp(type=1, location_type=1, location=torch.cuda.current_device())
        access = AccessDesc(location_type=1, location=torch.cuda.current_device(), flags=3)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(prop), ctypes.c_uint64(0))
        self._call("cuMemMap", where, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._call("cuMemSetAccess", where, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
        return handle

    def _allocate(self, size: int, device: int, stream: int) -> int:
        size = -(-size // GRANULARITY) * GRANULARITY
        addr = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(addr), ctypes.c_size_t(size), ctypes.c_size_t(0), zero, zero)
        self.segments[addr.value] = (size, self._map(addr.value, size))
        return addr.value

    def _free(self, addr: int, size: int, device: int, stream: int) -> None:
        size, handle = self.segments.pop(addr)
        if not self.unmapped:
            self._call("cuMemUnmap", ctypes.c_uint64(addr), ctypes.c_size_t(size))
            self._call("cuMemRelease", handle)
        self._call("cuMemAddressFree", ctypes.c_uint64(addr), ctypes.c_size_t(size))
