"""Stands in for CuPy: the names that memtrace uses, with fixed figures."""

from types import SimpleNamespace


class MemoryPool:
    def malloc(self, size):
        raise MemoryError

    def used_bytes(self):
        return 3 << 20

    def total_bytes(self):
        return 5 << 20

    def get_limit(self):
        return 0


class MemoryAsyncPool:
    def malloc(self, size):
        raise MemoryError


current = MemoryPool().malloc


def set_allocator(allocator=None):
    global current
    current = allocator


cuda = SimpleNamespace(
    MemoryPool=MemoryPool,
    MemoryAsyncPool=MemoryAsyncPool,
    set_allocator=set_allocator,
    get_allocator=lambda: current,
    runtime=SimpleNamespace(getDevice=lambda: 0),
)
