"""Operators give their results the values that kernels would have computed.

The kernels of this module stand between autograd and PyTorch's own CUDA kernels, at the dispatch key BackendSelect. They serve Python,
C++, autograd's threads and the fallbacks of compiled code, but not fake tensors. Each calls PyTorch's kernel, so that it allocates what it
always does, and then sees to the values of the result:

- Small tensors whose arguments are in memory are computed at once, by the operator's own CPU kernel.
- Others become expressions (`expressions`), which are computed when a size, a branch or a copy to the host asks for them, if their cost is
  limited.
- Floating-point numbers that follow from unknown ones are unknown. A single one is `values.UNKNOWN`, and what follows from it is computed.
- Integers and booleans that follow from unknown numbers are declared. `<`, `<=`, `>` and `>=` hold for the share of a tensor's elements
  that `SIMCUDA_NONZERO` sets. No two numbers are equal. A check of all elements passes. Choices among candidates (`topk`, `argmax`,
  `multinomial`) spread over them as `SIMCUDA_ROUTING` says. Others are zero: the status of a solver is success.

Operators that allocate by values (`nonzero`, `unique`, `coalesce`) are replaced, because their own kernels would read a size that
nothing computed. Errors of computing values do not reach the program.
"""

import functools
import linecache
import math
import os

import torch
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key, _dispatch_keyset_full_after

from . import exceptions, guesses
from .expressions import FULL, ZERO, Call, Constant, Expression, Guess, Memory, Operator, Update, Values, cost_of, flattened, is_written
from .expressions import of_view, policy, run_on_host, next_seed, with_storage
from .values import CPU, INTEGERS, MAX_NUMBERS, MAX_REDUCED, PLAIN, UNKNOWN, geometry_of, is_assumed, is_in_memory, is_number, is_small
from .values import notes, on_host, span_of, unknown_like, write

aten = torch.ops.aten

# The dispatch keys of kernels below those of this module, and of these the backends'.
BELOW = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
BACKENDS = BELOW.remove(DispatchKey.PythonDispatcher)

COMPARISONS = "eq ne lt le gt ge".split()
# Operators whose integer results are indices of candidates along a dimension.
CHOICES = "argmax argmin max min topk sort argsort kthvalue median nanmedian mode cummax cummin multinomial".split()
# Operators whose results have sizes that depend on values.
SIZED = "nonzero _unique2 unique_dim unique_consecutive unique_dim_consecutive".split()
# Operators that do not read the tensor that they write.
OVERWRITING = {f"aten::{name}_" for name in "fill zero random bernoulli uniform normal exponential geometric cauchy log_normal".split()}
# Operators that change or describe a tensor's storage and not its elements, whose results nothing has written yet, or a `Fill` wrote, and
# GradScaler's check, which finds what it finds in a healthy run: nothing.
UNTOUCHED = {
    f"aten::{name}" for name in """
        set_ resize_ resize_as_ record_stream is_set_to empty_like new_empty new_empty_strided _unsafe_view lift lift_fresh
        zeros_like ones_like full_like new_zeros new_ones new_full
        _amp_foreach_non_finite_check_and_unscale_
    """.split()
}

# The largest cost of values that are computed at once, in elements or multiplications.
MAX_COST_AT_ONCE = 1 << 25
# The same for integers that could wait. Their memory could be read by others.
MAX_COST_OF_INTEGERS = 1 << 18
# The most elements that are computed from a single unknown number.
MAX_ASSUMED = 16
# The most zeros that are written at once. Others wait until something asks for them.
MAX_ZEROS = 4096
# The most operators of a tensor that is written in parts.
MAX_UPDATES = 256
# The most candidates among which tokens choose an expert.
MAX_EXPERTS = 1024
EVEN = "even"
# How tokens choose experts: `even`, `zipf:EXPONENT` or `one-rank`.
routing = os.environ.get("SIMCUDA_ROUTING", EVEN)

# PyTorch's calls of these pass a number as a tensor on the device, which has no form in Python.
UNREACHABLE = {"aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out"}

# The registrations, which end with these objects, and the qualified names of their overloads.
libraries = []
registered = set(UNREACHABLE)


def replaced(value, function):
    """An argument of an operator for a call on the host."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [replaced(one, function) for one in value]
    return CPU if isinstance(value, torch.device) else value


def with_tensors(args, places):
    """Arguments with tensors where a number is in the place of a tensor, as in `tensor + 1`.

    PyTorch hands such a tensor over as a number, but does not take it back. The operator's result has the same type either way.
    """
    args = list(args)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    for place in places:
        if place < len(args) and type(args[place]) in NUMBERS:
            has_dimensions = not tensors or any(one.dim() for one in tensors)
            dtype = None if has_dimensions else torch.result_type(tensors[0], args[place])
            args[place] = number_as_tensor(type(args[place]), args[place], dtype)
    return args


# Types of numbers, which are faster to compare than an abstract one.
NUMBERS = frozenset((bool, int, float, complex))


@functools.lru_cache(maxsize=1024)
def number_as_tensor(_, number, dtype):
    """A tensor on the host that operators only read. Programs use few numbers."""
    return torch.tensor(number, dtype=dtype, device="cpu")


def to_device(values, like, capacity=None):
    """A new tensor on the device of another one. Its memory has room for `capacity` elements, if more than the values need."""
    result = torch.empty(max(values.numel(), capacity or 0), dtype=values.dtype, device=like.device).resize_(values.shape)
    put(result, values, False)
    return result


def selected(count, first=0):
    """The positions among `count` that the policy selects; of half of them, those from `first` on."""
    if policy == ZERO:
        return torch.arange(0)
    return torch.arange(count) if policy == FULL else torch.arange(first, count, 2)


def put(tensor, values, is_assumed):
    """Gives a tensor on a device values, which are those of a host tensor. A tensor on the host has its own."""
    if not tensor.is_cuda:
        return
    note = notes.find(tensor)
    if note is not None and note.expression is not None and note.geometry != geometry_of(tensor):
        part = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU).copy_(values)
        put_expression(tensor, Values(part, is_assumed))
        return
    write(tensor, values)
    if is_number(tensor) or is_assumed:
        notes.set(tensor, None, is_assumed)
    else:
        notes.discard(tensor)


def put_expression(tensor, expression):
    """Gives a tensor on a device the values of an expression. A tensor on the host has its own."""
    if not tensor.is_cuda:
        return
    note = notes.find(tensor)
    if note is not None and note.geometry != geometry_of(tensor):
        base = note.expression or Memory.of_storage(tensor, note)
        if base.operators + expression.operators > MAX_UPDATES:
            notes.discard(tensor)
            return
        note.expression = Update(base, note.geometry, expression, geometry_of(tensor))
        note.is_assumed = note.expression.is_assumed
        return
    if note is None and tensor._base is not None and tensor._base.numel() != tensor.numel():
        # A part of what is unknown.
        notes.discard(tensor)
        return
    notes.set(tensor, expression, expression.is_assumed)


def forget(tensor):
    """The values of a tensor on a device are unknown from now on; those of integers are zeros. A tensor on the
    host, such as the lengths of packed sequences, keeps its own."""
    if not tensor.is_cuda:
        return
    if is_number(tensor):
        if tensor.numel() == 1 and tensor._base is None and tensor.storage_offset() == 0:
            put(tensor, unknown_like(tensor), True)
        else:
            notes.discard(tensor)
    elif tensor.numel() <= MAX_ZEROS:
        put(tensor, torch.zeros((), dtype=tensor.dtype, device=CPU).expand(tensor.shape), True)
    elif note_is_whole(tensor):
        put_expression(tensor, Constant(0, tensor.shape, tensor.dtype))


def note_is_whole(tensor):
    """Whether a tensor is all of what is noted about its storage, if anything is."""
    note = notes.find(tensor)
    return note is None or note.geometry == geometry_of(tensor)


def is_unknown(tensor):
    """Whether nothing is known of the numbers of a tensor on a device. Tensors without a storage, such as sparse ones, are unknown."""
    if not tensor.is_cuda:
        return False
    if tensor.layout is not torch.strided:
        return True
    return notes.find(tensor) is None and is_number(tensor) and tensor.numel() > 0


def notes_of(inputs):
    """The notes of tensors by their `id`, None for those that are on the host or in memory; or None, if one of the tensors is unknown."""
    found = {}
    for one in inputs:
        note = None
        if one.is_cuda:
            if one.layout is not torch.strided:
                return None
            note = notes.find(one)
            if note is None and is_number(one) and one.numel():
                return None
        found[id(one)] = note
    return found


def known_values(tensor):
    """The values of a tensor on the host, computed if they are an expression; or None. They must not be changed."""
    if not tensor.is_cuda:
        return tensor
    note = notes.find(tensor)
    if note is None:
        return None if is_number(tensor) else on_host(tensor)
    if note.expression is None:
        return on_host(tensor)
    try:
        values = of_view(note, tensor).keep()
    except Exception:  # The memory of its arguments is gone, or no CPU kernel computes it.
        return None
    if values.shape != tensor.shape:
        return None
    if is_small(tensor) and note.geometry == geometry_of(tensor):
        write(tensor, values)
        note.expression = None
    return values


def as_expression(tensor):
    """The values of a tensor as an expression."""
    return expression_of(tensor, notes.find(tensor) if tensor.is_cuda else None)


def expression_of(tensor, note):
    """The values of a tensor, of whose storage there is a note on a device, as an expression."""
    if not tensor.is_cuda:
        return Values(tensor.clone() if tensor.numel() <= MAX_NUMBERS else tensor)
    if note is not None and note.expression is not None:
        return of_view(note, tensor)
    if tensor.numel() and span_of(tensor.shape, tensor.stride()) <= MAX_NUMBERS:
        own = on_host(tensor)
        copy = own.as_strided((span_of(tensor.shape, tensor.stride()), ), (1, )).clone().as_strided(tensor.shape, tensor.stride())
        return Values(copy, note is not None and note.is_assumed)
    return Memory(tensor, note)


def counted(tensor):
    """The values of a tensor for a count: those in memory if they are few, else UNKNOWN."""
    return on_host(tensor) if is_in_memory(tensor) and is_small(tensor) else unknown_like(tensor)


# By the number of a set of dispatch keys: those below the kernels of this module, and the backend if it is one of BACKENDS_SERVED.
KEYS = {}
BACKENDS_SERVED = (DispatchKey.CUDA, DispatchKey.SparseCUDA)


def keys_of(raw, keyset):
    """The entry of KEYS for a set of dispatch keys. Programs have few."""
    highest = (keyset & BACKENDS).highestPriorityTypeId()
    backend = next((key for key in BACKENDS_SERVED if key == highest), None)
    KEYS[raw] = keyset & BELOW, backend
    return KEYS[raw]


class Kernel:
    """The kernel for one overload of an operator."""

    def __init__(self, overload):
        arguments = overload._schema.arguments
        self.overload = overload
        self.handle = torch._C._dispatch_find_schema_or_throw(overload._schema.name, overload._schema.overload_name)
        self.names = [argument.name for argument in arguments]
        written = [argument for argument in arguments if is_written(argument)]
        overwrites = overload._schema.name in OVERWRITING
        self.written = [argument.name for argument in written]
        self.outputs = {argument.name for argument in written if argument.kwarg_only or overwrites}
        self.updated = {argument.name for argument in written} - self.outputs
        self.tensors = [index for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"]
        # The place of the tensor that says most often that nothing is known of the result.
        self.leading = None if overwrites else next(iter(self.tensors), None)
        # Optimizers call operators on lists of tensors.
        is_list = self.leading is None and not overwrites and bool(arguments) and str(arguments[0].type) == "List[Tensor]"
        self.leads_list = is_list and self.written in ([], [arguments[0].name])

    # The backend whose tensors are those of a simulated device.
    served = BACKENDS_SERVED[0]

    def __call__(self, keyset, *args, **kwargs):
        raw = keyset.raw_repr()
        below, backend = KEYS.get(raw) or keys_of(raw, keyset)
        for index in self.tensors:
            if index < len(args) and type(args[index]) in NUMBERS:
                args = with_tensors(args, self.tensors)
                break
        if backend is self.served and not torch._C._len_torch_dispatch_stack():
            return self.run(below, args, kwargs)
        return self.original(below, args, kwargs)

    def original(self, keyset, args, kwargs):
        """Calls PyTorch's kernel."""
        return self.handle.redispatch_boxed(keyset, *args, **kwargs)

    def run(self, keyset, args, kwargs):
        """The result on a device."""
        raise NotImplementedError

    def arguments(self, args, kwargs):
        """The arguments by name."""
        return {**dict(zip(self.names, args)), **kwargs}


class Computed(Kernel):
    """Runs PyTorch's kernel, and sees to the values of its results."""

    def __init__(self, overload):
        super().__init__(overload)
        self.has_host_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), "CPU")
        self.is_pointwise = torch.Tag.pointwise in overload.tags
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags

    def run(self, keyset, args, kwargs):
        if self.leading is not None and len(args) > self.leading:
            leading = args[self.leading]
            # Most operators of a model: unknown numbers of unknown numbers.
            if type(leading) in PLAIN and is_unknown(leading):
                result = self.original(keyset, args, kwargs)
                if (type(result) is torch.Tensor and result.dtype not in INTEGERS and result.layout is torch.strided
                        and (not self.written or result is leading)):
                    if not self.written:
                        if result.numel() == 1:
                            forget(result)
                        else:
                            notes.discard(result)
                    return result
                return self.settle_unknown(result, args, kwargs)
        elif self.leads_list and args and all(type(one) in PLAIN and is_unknown(one) for one in args[0]):
            result = self.original(keyset, args, kwargs)
            # Unknown numbers stay unknown.
            return result if self.written else self.settle_unknown(result, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self.run_with_values(keyset, args, kwargs)

    def settle_unknown(self, result, args, kwargs):
        """Sees to the results of unknown numbers."""
        with torch._C.DisableTorchFunction():
            arguments = self.arguments(args, kwargs)
            try:
                self.declare(self.results(result, arguments), arguments)
            except Exception:
                pass
        return result

    def results(self, result, arguments):
        """The tensors of a result, and those that an operator without one updates."""
        if self.overload._schema.returns:
            return with_storage(result)
        return with_storage([arguments[name] for name in self.written])

    def run_with_values(self, keyset, args, kwargs):
        arguments = self.arguments(args, kwargs)
        outputs = self.outputs
        inputs = flattened([value for name, value in arguments.items() if name not in outputs] if outputs else list(arguments.values()), [])
        found = notes_of(inputs)
        given = None if found is None else self.given(arguments, inputs, found)
        result = self.original(keyset, args, kwargs)
        results = self.results(result, arguments)
        try:
            if found is None:
                self.declare(results, arguments)
            elif given is None or not self.compute(results, arguments, given, inputs, args):
                self.express(results, arguments, inputs, args, found)
        except Exception:  # For example an invalid index, which a GPU reports later or not at all.
            for tensor in results:
                forget(tensor)
        return result

    def given(self, arguments, inputs, found):
        """The arguments for a call on the host, if it is made at once. Those that the operator updates are copies."""
        for one in inputs:
            if not is_small(one):
                return None
            note = found[id(one)]
            if note is not None and type(note.expression) is Constant:
                known_values(one)
            # The values of a view stay an expression: its memory is written with that of the whole.
            if note is not None and note.expression is not None:
                return None
        if self.is_random and not all(map(self.is_integer_output, [arguments.get(name) for name in self.outputs] or [None])):
            return None
        return {
            name: None if name in self.outputs else replaced(value, (lambda one: on_host(one).clone()) if name in self.updated else on_host)
            for name, value in arguments.items()
        }

    @staticmethod
    def is_integer_output(tensor):
        return isinstance(tensor, torch.Tensor) and not is_number(tensor) and tensor.dtype != torch.bool

    def compute(self, results, arguments, given, inputs, args):
        """Computes the results on the host and writes them, if that costs little."""
        if not self.has_host_kernel or not all(map(is_small, results)):
            return False
        if cost_of(self.overload, args, inputs, results) > MAX_COST_AT_ONCE:
            return False
        assumed = any(map(is_assumed, inputs))
        if assumed and any(is_number(one) and is_assumed(one) for one in inputs) and any(one.numel() > MAX_ASSUMED for one in results):
            raise ValueError("too many elements follow from an unknown one")
        for name in self.outputs:
            given[name] = torch.empty(arguments[name].shape, dtype=arguments[name].dtype, device=CPU)
        values = self.on_host(given, assumed)
        if len(values) != len(results):
            return False
        for tensor, value in zip(results, values):
            put(tensor, value, assumed and not self.is_certain(given))
        return True

    def is_certain(self, given):
        """Whether the result is that of a real run although arguments are assumed."""
        return False

    def on_host(self, given, assumed):
        """The results of the operator on the host."""
        return run_on_host(self.overload, given, next_seed() if self.is_random else None)

    def express(self, results, arguments, inputs, args, notes_found):
        """Notes the results as expressions of the arguments, for which there are these notes."""
        if not self.has_host_kernel:
            raise NotImplementedError
        outputs, own = {}, {}
        for name, value in arguments.items():
            if name in self.outputs and isinstance(value, torch.Tensor):
                outputs[name] = (value.shape, value.dtype)
            else:
                own[name] = replaced(value, lambda one: expression_of(one, notes_found[id(one)]))
        found = expressions_in(list(own.values()), [])
        call = Call(self.overload, {**own, **dict.fromkeys(outputs)}, outputs, self.updated, found,
                    cost_of(self.overload, args, inputs, results))
        if not call.is_cheap():
            self.declare(results, arguments)
            return
        for position, tensor in enumerate(results):
            expression = Operator(call, position, tensor.shape)
            if self.written or not tensor.is_cuda:
                put_expression(tensor, expression)
            else:
                notes.set_new(tensor, expression, call.is_assumed)
            if is_number(tensor):
                continue
            if call.cost <= MAX_COST_OF_INTEGERS or torch.is_inference_mode_enabled():
                known_values(tensor)

    def declare(self, results, arguments):
        """Sees to the results where arguments are unknown."""
        values = None
        if not all(map(is_number, results)):
            values = self.declared(results, arguments)
        for tensor, value in zip(results, values or [None] * len(results)):
            if is_number(tensor) or value is None:
                forget(tensor)
            elif isinstance(value, Expression):
                put_expression(tensor, value)
            else:
                put(tensor, value, True)

    def declared(self, results, arguments):
        """Values or expressions of the results where arguments are unknown, None where they are zeros; those of numbers are ignored."""
        inputs = flattened(list(arguments.values()), [])
        if not self.is_count or not all(map(is_small, results)) or any(one.numel() > MAX_REDUCED for one in inputs):
            return None
        given = {name: None if name in self.outputs else replaced(value, counted) for name, value in arguments.items()}
        for name in self.outputs:
            given[name] = torch.empty(results[0].shape, dtype=results[0].dtype, device=CPU)
        return self.on_host(given, True)

    @property
    def is_count(self):
        """Whether integers of unknown numbers are those of UNKNOWN."""
        return self.is_pointwise or self.overload._schema.name.removeprefix("aten::").rstrip("_") in COUNTS


# Operators that count or find elements, beside those that act on each element alone.
COUNTS = "sum any all count_nonzero bincount histc searchsorted bucketize isin nonzero_static".split()


def expressions_in(value, found):
    """Appends the expressions among arguments."""
    if isinstance(value, Expression):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            expressions_in(one, found)
    return found


class Fill(Kernel):
    """`zero_` and `fill_` with a number."""

    def run(self, keyset, args, kwargs):
        with torch._C.DisableTorchFunction():
            result = self.original(keyset, args, kwargs)
            tensor = args[0]
            if tensor.layout is torch.strided and tensor.numel():
                number = args[1] if len(args) > 1 else kwargs.get("value", 0)
                put_expression(tensor, Constant(number, tensor.shape, tensor.dtype))
                # Others could read the memory of integers.
                if not is_number(tensor) and (tensor.numel() <= MAX_COST_OF_INTEGERS or torch.is_inference_mode_enabled()):
                    known_values(tensor)
            return result


class Comparison(Computed):
    """`a < b` and its like."""

    def name(self):
        return self.overload._schema.name.removeprefix("aten::").rstrip("_")

    def is_certain(self, given):
        """Whether all numbers that can be in the place of assumed ones give the same answer: they are finite, and not negative."""
        first, second = given["self"], given["other"]
        return is_limit(second) or is_same(first, second) or not isinstance(second, torch.Tensor) and second == 0

    def on_host(self, given, assumed):
        first, second = given["self"], given["other"]
        name = self.name()
        if assumed and is_number(first) and not is_limit(second) and not is_same(first, second):
            if name in ("eq", "ne"):
                return [torch.full(torch.broadcast_shapes(first.shape, getattr(second, "shape", ())), name == "ne", device=CPU)]
            # Programs ask this of a slope, and go on as long as it descends.
            if name == "gt" and not isinstance(second, torch.Tensor) and second < 0:
                return [torch.zeros(first.shape, dtype=torch.bool, device=CPU)]
        return super().on_host(given, assumed)

    def declared(self, results, arguments):
        first, second = arguments["self"], arguments["other"]
        (result, ) = results
        if is_limit(second) or is_same(first, second):
            holds = bool(self.overload(torch.ones(()), torch.ones(()) if isinstance(second, torch.Tensor) else second))
            return [Constant(holds, result.shape, result.dtype)]
        name = self.name()
        if name in ("eq", "ne") or result.numel() <= 1:
            return [Constant(name in ("ne", "ge"), result.shape, result.dtype)]
        if result.dtype != torch.bool:
            return None
        # The opposite comparison of the same numbers is true for the other half.
        key = (identity(first), identity(second))
        return [Guess(key, name in ("le", "lt"), result.shape)]


# Numbers by what was compared, so that results do not depend on addresses.
identities = {}


def identity(value):
    """A number for a tensor or another argument of a comparison."""
    if isinstance(value, torch.Tensor):
        value = (value.data_ptr(), value.shape, value.stride()) if value.is_cuda or value.numel() > 1 else value.item()
    return identities.setdefault(value, len(identities))


class Dropout(Computed):
    """`native_dropout`, whose mask does not depend on what it drops."""

    def declared(self, results, arguments):
        call = Call(aten.bernoulli.p, {"self": Constant(0, results[1].shape, torch.float32), "p": 1 - arguments["p"]}, {}, set(), [],
                    results[1].numel())
        mask = Operator(call, 0, results[1].shape)
        return [None, converted(mask, results[1])]


class All(Computed):
    """`all()`, with which programs check their values: declared ones pass."""

    def run_with_values(self, keyset, args, kwargs):
        result = super().run_with_values(keyset, args, kwargs)
        if args and is_assumed(args[0]) and result.dtype == torch.bool and is_small(result):
            put(result, torch.ones((), dtype=torch.bool, device=CPU).expand(result.shape), True)
        return result


class Choice(Computed):
    """Operators that choose among candidates."""

    def express(self, results, arguments, inputs, args, notes_found):
        super().express([one for one in results if is_number(one)] and results, arguments, inputs, args, notes_found)
        values = self.declared(results, arguments)
        if not is_number(arguments["self"]):
            return
        for tensor, value in zip(results, values):
            if value is not None:
                notes.discard(tensor)
                put(tensor, value, True)

    def declared(self, results, arguments):
        candidates = arguments["self"]
        dimension = arguments.get("dim", -1)
        if dimension is None or isinstance(dimension, str):
            candidates, dimension = candidates.flatten(), 0
        count = candidates.size(dimension) if candidates.dim() else 1
        name = self.overload._schema.name.removeprefix("aten::")
        chooses_experts = name in ("topk", "argmax", "max", "multinomial") and 1 < count <= MAX_EXPERTS and candidates.dim() > 1
        choose = routed if chooses_experts and routing != EVEN else spread
        return [None if is_number(one) or not is_small(one) else choose(one, count, dimension, candidates.dim()) for one in results]


def spread(result, count, dimension, dimensions):
    """Indices among `count` candidates: each choice goes on where the last one ended.

    The first is in the middle, where no vocabulary has special tokens such as the one that ends a sequence.
    """
    has_dimension = result.dim() == dimensions and result.dim() > 0
    shape = result.movedim(dimension, -1).shape if has_dimension else result.shape
    indices = (torch.arange(result.numel()) + count // 2).remainder_(max(count, 1)).view(shape)
    return indices.movedim(-1, dimension) if has_dimension else indices


def routed(result, count, dimension, dimensions):
    """Indices among `count` experts as `SIMCUDA_ROUTING` says: the first ones for all tokens, or by a Zipf distribution."""
    has_dimension = result.dim() == dimensions and result.dim() > 0
    shape = result.movedim(dimension, -1).shape if has_dimension else (*result.shape, 1)
    chosen = shape[-1]
    rows = math.prod(shape[:-1])
    if routing.startswith("zipf:"):
        weights = torch.arange(1, count + 1, dtype=torch.float64).pow_(-float(routing.removeprefix("zipf:")))
        generator = torch.Generator(CPU).manual_seed(next_seed())
        # The largest of these are a sample without replacement (Efraimidis and Spirakis, 2006).
        keys = torch.rand(rows, count, dtype=torch.float64, generator=generator).log_().div_(weights)
        indices = keys.topk(chosen, 1).indices
    else:
        indices = torch.arange(chosen).expand(rows, chosen)
    indices = indices.reshape(shape)
    return indices.movedim(-1, dimension) if has_dimension else indices.squeeze(-1)


def is_limit(value):
    """Whether an argument is an infinite number, or NaN, on the host."""
    if isinstance(value, torch.Tensor):
        return not value.is_cuda and value.numel() == 1 and not value.isfinite().item()
    return not isinstance(value, complex) and not math.isfinite(value)


def is_same(first, second):
    """Whether two tensors are the same elements in memory."""
    return (isinstance(second, torch.Tensor) and first.data_ptr() == second.data_ptr() and first.shape == second.shape
            and first.stride() == second.stride() and first.dtype == second.dtype)


class Alias(Kernel):
    """A view that lives on without the tensor that it was made of."""

    def run(self, keyset, args, kwargs):
        result = self.original(keyset, args, kwargs)
        if type(args[0]) in PLAIN and result.numel():
            notes.follow(args[0], result)
        return result


class Copy(Kernel):
    """`copy_`, to, from and on a device."""

    def run(self, keyset, args, kwargs):
        with torch._C.DisableTorchFunction():
            destination, source = args[:2]
            if not destination.is_cuda:
                exceptions.note_read()
            result = self.original(keyset, args, kwargs)
            try:
                self.copy(destination, source)
            except Exception:
                if destination.is_cuda:
                    forget(destination)
            return result

    def copy(self, destination, source):
        is_plain = destination.dtype == source.dtype and destination.is_contiguous() and source.is_contiguous()
        if not destination.is_cuda:
            note = notes.find(source)
            values = known_values(source)
            if values is None or note is not None and note.is_assumed:
                guesses.note_read()
            if values is None:
                destination.copy_(unknown_like(source) if is_number(source) else torch.zeros_like(destination))
            elif not is_plain or note is not None:
                destination.copy_(values)
            if note is not None and note.is_assumed and is_number(source) and source.numel() == 1:
                destination.mul_(assumed_answer(note))
            return
        if is_unknown(source):
            if is_number(destination):
                forget(destination)
            elif is_small(destination):
                put(destination, unknown_like(source), True)
            else:
                put_expression(destination, Constant(int(UNKNOWN), destination.shape, destination.dtype))
            return
        note = notes.find(source) if source.is_cuda else None
        if is_in_memory(source) and is_small(destination) and is_small(source):
            put(destination, on_host(source), note is not None and note.is_assumed)
        elif is_in_memory(source) and is_plain:
            # A copy without conversion is one of bytes, which the simulated CUDA did.
            if note_is_whole(destination):
                notes.set(destination, None, note is not None and note.is_assumed)
            else:
                notes.discard(destination)
        else:
            expression = converted(as_expression(source), destination)
            if expression.call.is_cheap():
                put_expression(destination, expression)
                if not is_number(destination) and torch.is_inference_mode_enabled():
                    known_values(destination)
            else:
                forget(destination)


def converted(expression, destination):
    """The values of an expression after a copy into a tensor."""
    outputs = {"self": (destination.shape, destination.dtype)}
    call = Call(aten.copy_.default, {"self": None, "src": expression}, outputs, set(), [expression], 2 * destination.numel())
    return Operator(call, 0, destination.shape)


# How often each line of the program read an assumed number, and how often each line of any file (`exceptions.line_of_read`) did for it.
reads = {}
reads_of_lines = {}


def assumed_answer(note):
    """The factor by which an assumed number is smaller than when this line of the program read one for the first time.

    Losses and errors fall. So loops that wait for them end, and a program that compares two of them finds a difference.
    """
    if note is None or note.factor is None:
        line = exceptions.line_of_program()
        # Of one line of the program, no two numbers are equal.
        count = reads[line] = reads.get(line, -1) + 1
        read = (line, exceptions.line_of_read())
        repeated = reads_of_lines[read] = reads_of_lines.get(read, -1) + 1
        factor = 1 / (1 + 0.01 * count) * 0.5**min(max(repeated - MAX_ANSWERS, 0), 60)
        if note is None:
            return factor
        note.factor = factor
    return note.factor


# By line of the program, and the line that read it: the last answer to a comparison of assumed numbers, and how often in a row it was given.
answers = {}
# The number of equal answers after which a line gets the other one once.
MAX_ANSWERS = 100


def is_check(file, line):
    """Whether a line of the program raises an exception for one of the answers."""
    text, following = (linecache.getline(file, number).strip() for number in (line, line + 1))
    return text.startswith("assert") or following.startswith("raise")


def assumed_truth(value):
    """The answer to a comparison of assumed numbers that a branch asks for. A loop that waits for the other answer ends."""
    line = exceptions.line_of_program()
    if line is None or is_check(*line):
        return value
    place = (line, exceptions.line_of_read())
    last, count = answers.get(place, (value, 0))
    count = count + 1 if last == value else 1
    if count > MAX_ANSWERS:
        answers[place] = (value, 0)
        return not value
    answers[place] = (value, count)
    return value


class Scalar(Kernel):
    """`item()`."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        value = self.original(keyset, args, kwargs)
        tensor = args[0]
        with torch._C.DisableTorchFunction():
            note = notes.find(tensor)
            known = known_values(tensor)
            if known is None:
                guesses.note_read()
                return value * 0 + UNKNOWN * assumed_answer(note) if is_number(tensor) else type(value)(0)
            if note is None:
                return value
            value = known.item()
            if not note.is_assumed:
                return value
            guesses.note_read()
            if isinstance(value, bool):
                return assumed_truth(value)
            if isinstance(value, int):
                return value
            return value * assumed_answer(note)


class Equal(Kernel):
    """`equal()`, whose kernel calls no operator."""

    def run(self, keyset, args, kwargs):
        exceptions.note_read()
        self.original(keyset, args, kwargs)
        with torch._C.DisableTorchFunction():
            first, second = args
            if is_same(first, second):
                return True
            if first.shape != second.shape:
                return False
            values = [known_values(one) for one in args]
            if any(one is None for one in values) or is_assumed(first) or is_assumed(second):
                guesses.note_read()
                return False
            return torch.equal(*values)


class Sized(Kernel):
    """Operators that allocate by values."""

    def run(self, keyset, args, kwargs):
        with torch._C.DisableTorchFunction():
            exceptions.note_read()
            arguments = self.arguments(args, kwargs)
            tensor = arguments["self"]
            note = notes.find(tensor) if tensor.is_cuda else None
            own = known_values(tensor) if note is not None and note.expression is not None or is_small(tensor) else None
            is_guessed = own is None or note is not None
            try:
                values = self.overload(**{**arguments, "self": self.stand_in(tensor, arguments) if own is None else own})
            except Exception:  # Invalid arguments, which PyTorch's kernel reports.
                return self.original(keyset, args, kwargs)
            first, *others = (values, ) if isinstance(values, torch.Tensor) else values
            if is_guessed:
                name = self.overload._schema.name.removeprefix("aten::").lstrip("_")
                dimension = arguments.get("dim")
                total = tensor.size(dimension) if isinstance(dimension, int) and tensor.dim() else tensor.numel()
                chosen = first.size(dimension) if isinstance(dimension, int) and first.dim() else first.size(0)
                if total > 1:
                    guesses.note_size(name, chosen, total, own is None or note.is_assumed)
            if self.overload._schema.name == "aten::nonzero":
                # PyTorch fills one row per dimension, and returns its transpose.
                return to_device(first.t().contiguous(), tensor).t()
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

    served = BACKENDS_SERVED[1]

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
        if all(is_in_memory(one) and is_small(one) and not is_assumed(one) for one in (boxes, scores)):
            kept = self.overload(on_host(boxes), on_host(scores), *others, **kwargs)
        else:
            kept = selected(boxes.size(0))
            guesses.note_size("nms", len(kept), boxes.size(0), True)
        return to_device(kept, boxes)


def register(namespace, operators, kernel, serves=lambda _: True):
    """Registers kernels for those overloads of operators that PyTorch does not compose of others, and that a function accepts."""
    library = torch.library.Library(namespace, "IMPL")
    libraries.append(library)
    for name in operators:
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in [getattr(packet, one) for one in packet.overloads()] if packet else []:
            qualified = overload.name()
            if qualified not in registered and is_replaceable(qualified) and serves(overload):
                registered.add(qualified)
                library.impl(qualified.removeprefix(f"{namespace}::"), kernel(overload), "BackendSelect", with_keyset=True)


def is_replaceable(qualified):
    """Whether an overload has a kernel for CUDA and none where those of this module go."""
    if not torch._C._dispatch_has_kernel(qualified) or _dispatch_has_kernel_for_dispatch_key(qualified, "BackendSelect"):
        return False
    # Some have one kernel for all backends.
    return any(_dispatch_has_kernel_for_dispatch_key(qualified, key) for key in ("CUDA", "SparseCUDA", "CompositeExplicitAutograd"))


def computes(overload):
    """Whether an operator has arguments and results that are tensors, and its results are not views."""
    schema = overload._schema
    if schema.name in UNTOUCHED or not (schema.returns or any(map(is_written, schema.arguments))):
        return False
    if not any("Tensor" in str(one.type) for one in schema.arguments) or not all("Tensor" in str(one.type) for one in schema.returns):
        return False
    return all(one.alias_info is None or one.alias_info.is_write for one in schema.returns)


def is_composed(overload):
    """Whether an operator is composed of others, which may write its results through tensors that they do not return."""
    return not any(one.kwarg_only and is_written(one) for one in overload._schema.arguments)


def chooses(overload):
    """Whether the overload of an operator of CHOICES chooses along a dimension."""
    return overload._schema.name == "aten::multinomial" or any(one.name == "dim" for one in overload._schema.arguments)


def with_updates(operators):
    """The operators and those that do the same in place."""
    return [*operators, *(f"{name}_" for name in operators)]


def names_of(key):
    """The names of all operators of PyTorch that have a kernel for a dispatch key."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    return sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def install():
    """Registers the kernels for PyTorch's operators."""
    register("aten", ["copy_"], Copy)
    register("aten", ["_unsafe_view"], Alias)
    register("aten", ["_local_scalar_dense"], Scalar)
    register("aten", ["equal"], Equal)
    register("aten", SIZED, Sized)
    register("aten", ["_coalesce"], Coalesce)
    register("aten", with_updates(COMPARISONS), Comparison)
    register("aten", CHOICES, lambda overload: (Choice if chooses(overload) else Computed)(overload))
    register("aten", ["all"], All)
    register("aten", ["native_dropout"], Dropout)
    register("aten", ["zero_", "fill_"], Fill, lambda overload: overload.name() in ("aten::zero_", "aten::fill_.Scalar"))
    register("aten", names_of("CUDA"), Computed, computes)
    register("aten", names_of("CompositeExplicitAutograd"), Computed, lambda overload: computes(overload) and is_composed(overload))


def install_torchvision():
    """Registers the kernels for torchvision's operators."""
    register("torchvision", ["nms"], Suppression)
