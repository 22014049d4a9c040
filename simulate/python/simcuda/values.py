"""Which values on a device are known, and host tensors that share the memory of device tensors.

Simulated device memory is host memory at the same address, so a host tensor over it reads and writes the device's values.

A tensor's values are known by the address of its storage, without a reference to the storage: a reference, or PyTorch's Python object of a
storage, changes where autograd accumulates in place, and so how much memory a program takes. Weak references to tensors say whether an
address is still that of the storage that was noted.

Integers and booleans are in memory unless they are noted as an expression (`expressions`). Floating-point numbers are in memory if that is
noted, or an expression; all others are unknown.
"""

import torch

# The value of a floating-point number that nothing computes: finite, and no error as a loss, a norm, a divisor or the argument of a
# logarithm.
UNKNOWN = 1.0
# The largest tensors whose values are computed at once, in elements: more than routing, anchors and tokens have, and less than what
# compilers clear to flush a cache, thousands of times.
MAX_INTEGERS = 1 << 22
MAX_NUMBERS = 1 << 16
# The largest tensors that are reduced with UNKNOWN as their elements, in elements.
MAX_REDUCED = 1 << 26

# The most tensors that say whether a storage lives.
MAX_REFERENCES = 8

CPU = torch.device("cpu")
# The types of tensors without methods of a subclass, which could be ones without memory.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class Note:
    """The knowledge of the storage at an address.

    `expression` gives the values of the tensor that was noted, or is None if they are in memory. `is_assumed` is true if they follow from
    values that nothing computes.
    """

    __slots__ = ("references", "expression", "is_assumed", "geometry", "dtype", "factor")

    def __init__(self, tensor, expression, is_assumed):
        self.references = [reference_to(tensor)]
        self.expression = expression
        self.is_assumed = is_assumed
        self.geometry = geometry_of(tensor)
        self.dtype = tensor.dtype
        # By what an assumed number was multiplied when the program read it.
        self.factor = None

    def is_valid(self):
        """Whether the storage lives, as far as tensors that were seen tell."""
        for reference in self.references:
            if not reference.expired():
                return True
        return False


class Notes:
    """The notes by the addresses of storages."""

    def __init__(self):
        self.notes = {}
        self.sweep_at = 1024

    def find(self, tensor):
        """The note about the storage of a tensor on a device, or None."""
        note = self.notes.get(address_of(tensor))
        if note is None:
            return None
        base = tensor if tensor._base is None else tensor._base
        if note.dtype != base.dtype:
            # The tensor that was noted lives on with another storage, as parameters do whose `data` is set.
            return None
        if note.is_valid():
            return note
        if note.geometry == geometry_of(base):
            # Another tensor of this storage, such as one that autograd saved. Operators would have replaced the note of a former storage.
            note.references = [reference_to(tensor)]
            # It can also be a later tensor at the same address, which the program reads as another number.
            note.factor = None
            return note
        return None

    def set(self, tensor, expression=None, is_assumed=False):
        """Notes that the values of a tensor, and with it of its storage, are known."""
        if tensor.numel():
            note = Note(tensor, expression, is_assumed)
            former = self.find(tensor)
            if former is not None:
                note.references += [one for one in former.references if not one.expired()][:MAX_REFERENCES]
            self.notes[address_of(tensor)] = note
            self.sweep()

    def set_new(self, tensor, expression, is_assumed):
        """Notes the values of a tensor in a storage that was made for it."""
        if tensor.numel():
            self.notes[address_of(tensor)] = Note(tensor, expression, is_assumed)
            self.sweep()

    def sweep(self):
        """Removes the notes of storages that are gone, now and then."""
        if len(self.notes) > self.sweep_at:
            self.notes = {address: note for address, note in self.notes.items() if note.is_valid()}
            self.sweep_at = 2 * len(self.notes) + 1024

    def discard(self, tensor):
        """Notes that the values of a storage are not known, or for integers that they are in memory."""
        if self.notes:
            self.notes.pop(address_of(tensor), None)

    def follow(self, tensor, other):
        """Notes that another tensor has the same storage, so that it lives as long as either of them."""
        note = self.find(tensor)
        if note is not None:
            note.references = [one for one in note.references if not one.expired()][:MAX_REFERENCES] + [reference_to(other)]


notes = Notes()


def reference_to(tensor):
    """A weak reference to a tensor, or to the one that it is a view of, which lives as long."""
    base = tensor._base
    return torch._C._WeakTensorRef(tensor if base is None else base)


def geometry_of(tensor):
    """The place of a tensor's elements in its storage."""
    return (tensor.storage_offset(), tensor.shape, tensor.stride())


def address_of(tensor):
    """The address of a tensor's storage, if the tensor has elements."""
    offset = tensor.storage_offset()
    return tensor.data_ptr() - offset * tensor.element_size() if offset else tensor.data_ptr()


def span_of(shape, stride):
    """The number of elements of the storage from the first to the last one of a tensor that has elements."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def at_address(address, dtype, shape, stride):
    """A host tensor over memory that has elements."""
    memory = torch._C._construct_storage_from_data_pointer(address, CPU, span_of(shape, stride) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=CPU).set_(memory, 0, shape, stride)


def is_number(tensor):
    """Whether the elements are floating-point or complex numbers."""
    return tensor.dtype not in INTEGERS and (tensor.is_floating_point() or tensor.is_complex())


def is_in_memory(tensor):
    """Whether the values that a real run would have, or declared ones, are in memory."""
    if not tensor.is_cuda:
        return True
    note = notes.find(tensor)
    return not is_number(tensor) if note is None else note.expression is None


def is_assumed(tensor):
    """Whether the values follow from some that nothing computes."""
    note = notes.find(tensor) if tensor.is_cuda else None
    return note is not None and note.is_assumed


def is_small(tensor):
    """Whether the values may be computed at once."""
    return tensor.numel() <= (MAX_NUMBERS if is_number(tensor) else MAX_INTEGERS)


def on_host(tensor):
    """A host tensor over the memory of a device tensor."""
    if not tensor.is_cuda:
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
    return at_address(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def write(tensor, values):
    """Writes values into the memory of a tensor."""
    on_host(tensor).copy_(values)


def unknown_like(tensor):
    """A host tensor of this shape and type whose elements are UNKNOWN, with one element in memory."""
    return torch.full((), UNKNOWN, dtype=tensor.dtype, device=CPU).expand(tensor.shape)
