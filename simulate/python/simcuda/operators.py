"""Operators whose results decide sizes and branches get the values that kernels would have computed.

The kernels of this module stand between autograd and PyTorch's own CUDA kernels, at the dispatch key BackendSelect. They serve Python,
C++, autograd's threads and the fallbacks of compiled code, but not fake tensors. Each calls PyTorch's kernel, so that it allocates what it
always does, and then writes values into the result:

- Integers and booleans are computed on the host.
- A floating-point number that is not true counts as `values.UNKNOWN`.
- The order of such numbers is declared. `<`, `<=`, `>` and `>=` hold for the share of a tensor's elements that `SIMCUDA_NONZERO` sets. Of a
  single element only `>=` holds: programs check that a number is not negative, and loop while one is above or below a limit. No two
  numbers are equal. A check of all elements passes. Choices among candidates (`topk`, `argmax`, `multinomial`) spread evenly over them.

Operators that allocate by values (`nonzero`, `unique`, `coalesce`) are replaced, because their own kernels would read a size that
nothing computed. What cannot be computed is left as it is, and errors of such attempts do not reach the program.
"""

import math
import os
from numbers import Number

import torch
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key, _dispatch_keyset_full_after

from . import exceptions
from .values import MAX_REDUCED, UNKNOWN, counted, declared_storages, is_number, is_small, is_true, mark, on_host, unknown_like

aten = torch.ops.aten

# The dispatch keys of kernels below those of this module, and of these the backends'.
BELOW = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
BACKENDS = BELOW.remove(DispatchKey.PythonDispatcher)

# Elementwise operators, reductions, indexing, and operators that generate values.
COMPUTED = """
    add sub rsub mul div remainder fmod floor_divide pow neg abs sign clamp clamp_min clamp_max maximum minimum reciprocal
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __lshift__ __rshift__
    logical_and logical_or logical_xor logical_not isin
    sum prod any max min amax amin aminmax cumsum cumprod count_nonzero mean median nanmedian
    cat index _index_put_impl_ index_select index_add index_copy index_fill gather scatter scatter_add scatter_reduce
    masked_fill masked_scatter where take put flip roll tril triu
    fill arange range random bernoulli randperm eye linspace
    _amp_update_scale bincount histc repeat_interleave searchsorted bucketize nonzero_static
""".split()
COMPARISONS = "eq ne lt le gt ge".split()
# Operators whose integer results are indices of candidates along a dimension.
CHOICES = "argmax argmin max min topk sort argsort kthvalue median nanmedian mode cummax cummin multinomial".split()
# Operators whose results have sizes that depend on values.
SIZED = "nonzero _unique2 unique_dim unique_consecutive unique_dim_consecutive".split()
# Operators that do not read the tensor that they write.
OVERWRITING = {f"aten::{name}" for name in ("fill_", "random_", "bernoulli_")}

FULL, HALF, ZERO = "full", "half", "zero"
policy = os.environ.get("SIMCUDA_NONZERO", HALF)

# PyTorch's calls of these pass a number as a tensor on the device, which has no form in Python.
UNREACHABLE = {"aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out"}

# The registrations, which end with these objects, and the qualified names of their overloads.
libraries = []
registered = set(UNREACHABLE)
# The source of random numbers. The program's own sources must not notice.
generator = torch.Generator("cpu").manual_seed(0)


def tensors_in(value, found):
    """Appends the tensors among the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            tensors_in(one, found)
    return found


def replaced(value, function):
    """An argument of an operator for a call on the host."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [replaced(one, function) for one in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def with_tensors(args, places):
    """Arguments with tensors where a number is in the place of a tensor, as in `tensor + 1`.

    PyTorch hands such a tensor over as a number, but does not take it back. The operator's result has the same type either way.
    """
    args = list(args)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    for place in places:
        if place < len(args) and isinstance(args[place], Number):
            has_dimensions = not tensors or any(one.dim() for one in tensors)
            dtype = None if has_dimensions else torch.result_type(tensors[0], args[place])
            args[place] = torch.tensor(args[place], dtype=dtype, device="cpu")
    return args


def write(tensor, values):
    """Writes values into the memory of a tensor."""
    on_host(tensor).copy_(values)


def to_device(values, like, capacity=None):
    """A new tensor on the device of another one. Its memory has room for `capacity` elements, if more than the values need."""
    result = torch.empty(max(values.numel(), capacity or 0), dtype=values.dtype, device=like.device).resize_(values.shape)
    write(result, values)
    return result


def selected(count, first=0):
    """The positions among `count` that the policy selects; of half of them, those from `first` on."""
    if policy == ZERO:
        return torch.arange(0)
    return torch.arange(count) if policy == FULL else torch.arange(first, count, 2)


class Kernel:
    """The kernel for one overload of an operator."""

    def __init__(self, overload):
        arguments = overload._schema.arguments
        self.overload = overload
        self.handle = torch._C._dispatch_find_schema_or_throw(overload._schema.name, overload._schema.overload_name)
        self.names = [argument.name for argument in arguments]
        written = [argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
        overwrites = overload._schema.name in OVERWRITING
        self.outputs = {argument.name for argument in written if argument.kwarg_only or overwrites}
        self.updated = {argument.name for argument in written} - self.outputs
        self.tensors = [index for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"]

    def __call__(self, keyset, *args, **kwargs):
        if any(isinstance(args[index], Number) for index in self.tensors if index < len(args)):
            args = with_tensors(args, self.tensors)
        key = (keyset & BACKENDS).highestPriorityTypeId()
        if self.serves(key) and not torch._C._len_torch_dispatch_stack():
            # The program's default device is not that of this module's tensors.
            with torch._C.DisableTorchFunction():
                return self.run(keyset, args, kwargs)
        return self.original(keyset, args, kwargs)

    def serves(self, key):
        """Whether tensors of a backend are those of a simulated device."""
        return key == DispatchKey.CUDA

    def original(self, keyset, args, kwargs):
        """Calls PyTorch's kernel."""
        return self.handle.redispatch_boxed(keyset & BELOW, *args, **kwargs)

    def run(self, keyset, args, kwargs):
        """The result on a device."""
        raise NotImplementedError

    def arguments(self, args, kwargs):
        """The arguments by name."""
        return {**dict(zip(self.names, args)), **kwargs}


class Computed(Kernel):
    """Runs PyTorch's kernel, and computes its results on the host."""

    def run(self, keyset, args, kwargs):
        arguments = self.arguments(args, kwargs)
        updated = self.copies_of_updated(arguments)
        result = self.original(keyset, args, kwargs)
        results = tensors_in(result, [])
        try:
            values = self.values(results, {**arguments, **updated}) or [None] * len(results)
            for tensor, value in zip(results, values):
                if value is not None:
                    write(tensor, value)
                mark(tensor, value is not None)
        except Exception:  # For example an invalid index, which a GPU reports later or not at all.
            for tensor in results:
                mark(tensor, False)
        self.pass_on_declared(results, arguments)
        return result

    def pass_on_declared(self, results, arguments):
        """Booleans of declared booleans are declared, too."""
        inputs = tensors_in(list(arguments.values()), [])
        if any(one.dtype == torch.bool and one in declared_storages for one in inputs):
            for result in results:
                if result.dtype == torch.bool:
                    declared_storages.add(result)

    def copies_of_updated(self, arguments):
        """The values that the operator updates in place, before the update."""
        tensors = {name: arguments[name] for name in self.updated}
        return {name: on_host(tensor).clone() for name, tensor in tensors.items() if is_true(tensor) and is_small(tensor)}

    def values(self, results, arguments):
        """The values of each result, None where they are unknown; or None for all."""
        inputs = tensors_in([value for name, value in arguments.items() if name not in self.outputs], [])
        if not all(map(is_small, results)):
            return None
        if all(is_true(one) and is_small(one) for one in inputs):
            return self.on_host(arguments, on_host)
        if all(map(is_number, results)) or any(one.numel() > MAX_REDUCED for one in inputs):
            return None
        values = self.declared(results, arguments)
        return [None if is_number(tensor) else value for tensor, value in zip(results, values)]

    def on_host(self, arguments, function):
        """The results of the operator on the host, with arguments that a function makes of those of the device."""
        on_host = {}
        for name, value in arguments.items():
            if name in self.outputs:
                on_host[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            else:
                on_host[name] = replaced(value, function)
        if "generator" in self.names:
            on_host["generator"] = generator
        return tensors_in(self.overload(**on_host), [])

    def declared(self, results, arguments):
        """The values of the results where arguments are unknown; those of floating-point results are ignored."""
        return self.on_host(arguments, counted)


class Comparison(Computed):
    """`a < b` and its like."""

    def declared(self, results, arguments):
        first, second = arguments["self"], arguments["other"]
        if is_limit(second) or is_same(first, second):
            return self.on_host(arguments, counted)
        (result, ) = results
        declared_storages.add(result)
        name = self.overload._schema.name.removeprefix("aten::").rstrip("_")
        is_single = result.numel() <= 1
        values = torch.full((result.numel(), ), name == "ne" or is_single and name == "ge", dtype=torch.bool)
        if name not in ("eq", "ne") and not is_single:
            # The opposite comparison of the same numbers is true for the other half.
            values[selected(len(values), first=int(name in ("ge", "gt")))] = True
        return [values.view(result.shape)]


class All(Computed):
    """`all()`, with which programs check their values: declared ones pass."""

    def values(self, results, arguments):
        if arguments["self"] in declared_storages:
            return [torch.ones(results[0].shape, dtype=torch.bool)]
        return super().values(results, arguments)


class Choice(Computed):
    """Operators that choose among candidates."""

    def declared(self, results, arguments):
        candidates = arguments["self"]
        dimension = arguments.get("dim", -1)
        if dimension is None:
            candidates, dimension = candidates.flatten(), 0
        count = candidates.size(dimension) if candidates.dim() else 1
        return [None if is_number(one) else spread(one, count, dimension, candidates.dim()) for one in results]


def spread(result, count, dimension, dimensions):
    """Indices among `count` candidates: each choice goes on where the last one ended.

    The first is in the middle, where no vocabulary has special tokens such as the one that ends a sequence.
    """
    has_dimension = result.dim() == dimensions and result.dim() > 0
    shape = result.movedim(dimension, -1).shape if has_dimension else result.shape
    indices = (torch.arange(result.numel()) + count // 2).remainder_(max(count, 1)).view(shape)
    return indices.movedim(-1, dimension) if has_dimension else indices


def is_limit(value):
    """Whether an argument is an infinite number, or NaN, on the host."""
    if isinstance(value, torch.Tensor):
        return not value.is_cuda and value.numel() == 1 and not value.isfinite().item()
    return not isinstance(value, complex) and not math.isfinite(value)


def is_same(first, second):
    """Whether two tensors are the same elements in memory."""
    return (isinstance(second, torch.Tensor) and first.data_ptr() == second.data_ptr() and first.shape == second.shape
            and first.stride() == second.stride() and first.dtype == second.dtype)


class Copy(Kernel):
    """`copy_`, to, from and on a device."""

    def run(self, keyset, args, kwargs):
        result = self.original(keyset, args, kwargs)
        destination, source = args[:2]
        if not destination.is_cuda:
            exceptions.note_read()
        try:
            self.copy(destination, source)
        except Exception:
            mark(destination, False)
        return result

    def copy(self, destination, source):
        is_plain = destination.dtype == source.dtype and destination.is_contiguous() and source.is_contiguous()
        if not is_true(source):
            mark(destination, False)
            if not destination.is_cuda or not is_number(destination) and is_small(destination):
                on_host(destination).copy_(unknown_like(source))
        elif is_small(destination) and is_small(source) or not destination.is_cuda:
            on_host(destination).copy_(on_host(source))
            mark(destination, True)
        else:
            # A copy without conversion is one of bytes, which the simulated CUDA did.
            mark(destination, is_plain)


class Scalar(Kernel):
    """`item()`."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        value = self.original(keyset, args, kwargs)
        return value if is_true(args[0]) else type(value)(UNKNOWN)


class Equal(Kernel):
    """`equal()`, whose kernel calls no operator."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        self.original(keyset, args, kwargs)
        if all(is_true(one) and is_small(one) for one in args):
            return torch.equal(*map(on_host, args))
        return is_same(*args)


class Sized(Kernel):
    """Operators that allocate by values."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        arguments = self.arguments(args, kwargs)
        tensor = arguments["self"]
        try:
            is_known = is_true(tensor) and is_small(tensor)
            values = self.overload(**{**arguments, "self": on_host(tensor) if is_known else self.stand_in(tensor, arguments)})
        except Exception:  # Invalid arguments, which PyTorch's kernel reports.
            return self.original(keyset, args, kwargs)
        if self.overload._schema.name == "aten::nonzero":
            # PyTorch fills one row per dimension, and returns its transpose.
            return to_device(values.t().contiguous(), tensor).t()
        first, *others = values
        # The distinct elements are sorted in memory that has room for all.
        return (to_device(first.to(tensor.dtype), tensor, tensor.numel()), *(to_device(one, tensor) for one in others))

    def stand_in(self, tensor, arguments):
        """A host tensor of the same shape: with the policy's share of nonzero, or distinct, elements."""
        count = tensor.size(arguments["dim"]) if isinstance(arguments.get("dim"), int) else tensor.numel()
        chosen = selected(count)
        if self.overload._schema.name == "aten::nonzero":
            return torch.zeros(count, dtype=torch.bool).index_fill_(0, chosen, True).view(tensor.shape)
        distinct = torch.arange(count) * max(len(chosen), 1) // max(count, 1)
        if count == tensor.numel():
            return distinct.view(tensor.shape)
        shape = [1] * tensor.dim()
        shape[arguments["dim"]] = count
        return distinct.view(shape).expand(tensor.shape)


class Coalesce(Kernel):
    """`coalesce()` of a sparse tensor: indices are integers, whose distinct ones are counted."""

    def serves(self, key):
        return key == DispatchKey.SparseCUDA

    def run(self, keyset, args, kwargs):
        tensor = args[0]
        indices, elements = tensor._indices(), tensor._values()
        if tensor._nnz() < 2 or not is_small(indices):
            return self.original(keyset, args, kwargs)
        exceptions.note_read()
        # The allocations of PyTorch's kernel: the flat indices, their order, the place of each distinct one, and the temporary of a sort.
        flat, *others = [torch.empty(tensor._nnz(), dtype=torch.int64, device=elements.device) for _ in range(3)]
        torch.empty(2 * flat.numel(), dtype=torch.int64, device=elements.device)
        # One number per position, as in PyTorch's kernel.
        strides = torch.tensor([math.prod(tensor.shape[axis + 1:tensor.sparse_dim()]) for axis in range(tensor.sparse_dim())])
        positions_on_host = torch.unique((on_host(indices) * strides[:, None]).sum(0))
        distinct = torch.stack([positions_on_host // stride % size for stride, size in zip(strides, tensor.shape)])
        count = len(positions_on_host)
        results = torch.empty((count, *elements.shape[1:]), dtype=elements.dtype, device=elements.device)
        if tensor.sparse_dim() == 1:
            positions = flat.resize_((1, count))
        else:
            positions = torch.empty((tensor.sparse_dim(), count), dtype=torch.int64, device=elements.device)
        write(positions, distinct)
        return aten._sparse_coo_tensor_unsafe(positions, results, tensor.shape, is_coalesced=True)


class Suppression(Kernel):
    """Non-maximum suppression (`torchvision::nms`) keeps the share of the policy."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        # This checks the arguments and keeps nothing, but allocates all else.
        self.original(keyset, args, kwargs)
        boxes, scores, *others = args
        if all(is_true(one) and is_small(one) for one in (boxes, scores)):
            kept = self.overload(on_host(boxes), on_host(scores), *others, **kwargs)
        else:
            kept = selected(boxes.size(0))
        return to_device(kept, boxes)


def register(namespace, operators, kernel):
    """Registers kernels for those overloads of operators that PyTorch does not compose of others."""
    library = torch.library.Library(namespace, "IMPL")
    libraries.append(library)
    for name in operators:
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in [getattr(packet, one) for one in packet.overloads()] if packet else []:
            qualified = overload.name()
            if qualified not in registered and is_replaceable(qualified):
                registered.add(qualified)
                library.impl(qualified.removeprefix(f"{namespace}::"), kernel(overload), "BackendSelect", with_keyset=True)


def is_replaceable(qualified):
    """Whether an overload has a kernel for CUDA and none where those of this module go."""
    if not torch._C._dispatch_has_kernel(qualified) or _dispatch_has_kernel_for_dispatch_key(qualified, "BackendSelect"):
        return False
    # `copy_` has one kernel for all backends.
    return qualified == "aten::copy_" or any(_dispatch_has_kernel_for_dispatch_key(qualified, key) for key in ("CUDA", "SparseCUDA"))


def chooses(overload):
    """Whether the overload of an operator of CHOICES chooses along a dimension."""
    return overload._schema.name == "aten::multinomial" or any(one.name == "dim" for one in overload._schema.arguments)


def with_updates(operators):
    """The operators and those that do the same in place."""
    return [*operators, *(f"{name}_" for name in operators)]


def install():
    """Registers the kernels for PyTorch's operators."""
    register("aten", ["copy_"], Copy)
    register("aten", ["_local_scalar_dense"], Scalar)
    register("aten", ["equal"], Equal)
    register("aten", SIZED, Sized)
    register("aten", ["_coalesce"], Coalesce)
    register("aten", with_updates(COMPARISONS), Comparison)
    register("aten", CHOICES, lambda overload: (Choice if chooses(overload) else Computed)(overload))
    register("aten", ["all"], All)
    register("aten", with_updates(COMPUTED), Computed)


def install_torchvision():
    """Registers the kernels for torchvision's operators."""
    register("torchvision", ["nms"], Suppression)
