"""Which values on a device are true, and host tensors that share the memory of device tensors.

Simulated device memory is host memory at the same address, so a host tensor over it reads and writes the device's values.

Integers and booleans are true, because `operators` computes or declares them. Of floating-point numbers, those are true that were
copied from the host, filled in, or computed by `operators` from true ones. All others count as UNKNOWN.
"""

import ctypes

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The value of a floating-point number that no kernel computed: finite, and no error as a loss, a norm, a divisor or the argument
# of a logarithm.
UNKNOWN = 1.0
# The largest tensors whose values are computed, in elements: more than routing, anchors and tokens have, and less than what
# compilers clear to flush a cache, thousands of times.
MAX_INTEGERS = 1 << 22
MAX_NUMBERS = 1 << 16
# The largest tensors that are reduced, in elements.
MAX_REDUCED = 1 << 26


class Storages:
    """Storages, by address, as long as they live."""

    def __init__(self):
        self.storages = {}
        self.sweep_at = 1024

    def __contains__(self, tensor):
        storage = tensor.untyped_storage()
        found = self.storages.get(storage.data_ptr())
        return found is not None and found.cdata == storage._cdata and not found.expired()

    def add(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = StorageWeakRef(storage)
        if len(self.storages) > self.sweep_at:
            self.storages = {address: found for address, found in self.storages.items() if not found.expired()}
            self.sweep_at = 2 * len(self.storages) + 1024

    def discard(self, tensor):
        if self.storages:
            self.storages.pop(tensor.untyped_storage().data_ptr(), None)


# Those of floating-point numbers that are true, and of booleans that were declared.
true_storages, declared_storages = Storages(), Storages()


def is_number(tensor):
    """Whether the elements are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_true(tensor):
    """Whether the values are those of a real run."""
    return not tensor.is_cuda or not is_number(tensor) or tensor in true_storages


def is_small(tensor):
    """Whether the values may be computed."""
    return tensor.numel() <= (MAX_NUMBERS if is_number(tensor) else MAX_INTEGERS)


def mark(tensor, is_true_now):
    """Notes whether the values of a tensor on a device are true from now on."""
    if tensor.is_cuda and is_number(tensor):
        if is_true_now:
            true_storages.add(tensor)
        else:
            true_storages.discard(tensor)


def on_host(tensor):
    """A host tensor over the memory of a device tensor."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    base = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def unknown_like(tensor):
    """A host tensor of this shape and type whose elements are UNKNOWN, with one element in memory."""
    return torch.full((), UNKNOWN, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def counted(tensor):
    """The known values of a tensor: those on the device if they are true and computed, else UNKNOWN."""
    return on_host(tensor) if is_true(tensor) and is_small(tensor) else unknown_like(tensor)
