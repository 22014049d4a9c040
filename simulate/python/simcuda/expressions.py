"""Values that are computed only when something asks for them.

The random numbers of a GPU are others in each run, but programs select by them: `rand(n) < 0.15`, dropout, points in a box, voxels. An
expression is an operator with its arguments, which are expressions too, and at the end random numbers or memory. When a size, a branch or a copy
to the host asks for values, PyTorch's own CPU kernels compute all of it with random numbers of their own. Masks then select the share that
they select on a GPU, and combinations of masks are consistent.

Expressions have a limited cost, so a model is none: what it computes is unknown (`values.UNKNOWN`). A comparison of unknown numbers is a
`Guess`, which is true for the share of elements that `SIMCUDA_NONZERO` sets.

Nothing here refers to memory of the device but by address, with a weak reference that says whether it is still the same.
"""

import math
import os
import random

import torch

from .values import CPU, address_of, at_address, geometry_of, reference_to, span_of

# The largest cost of an expression, in elements that its operators read and write, and in products of matrices. A processor computes it
# in about a second.
MAX_COST = 1 << 28
# The largest number of operators in a row, and in all.
MAX_DEPTH = 64
MAX_OPERATORS = 512
# The largest value that is kept after it was computed, in elements.
MAX_KEPT = 1 << 22

FULL, HALF, ZERO = "full", "half", "zero"
policy = os.environ.get("SIMCUDA_NONZERO", HALF)

# The source of random numbers. The program's own sources must not notice.
generator = torch.Generator(CPU).manual_seed(0)


class Unavailable(Exception):
    """The memory of an expression is in use for something else by now."""


class Expression:
    """Values of a tensor. `is_assumed` is true if a policy decides some of them. `evaluate(memo)` returns a host tensor."""

    cost = depth = operators = 0
    is_assumed = False
    kept = None

    def value(self, memo=None):
        """A host tensor with the values, which must not be changed."""
        if self.kept is not None:
            return self.kept
        memo = {} if memo is None else memo
        if id(self) not in memo:
            memo[id(self)] = self.evaluate(memo)
        return memo[id(self)]

    def keep(self):
        """The values, which are kept if they are few."""
        value = self.value()
        if value.numel() <= MAX_KEPT:
            self.kept = value
        return value


class Memory(Expression):
    """The content of the memory of a tensor on a device, as long as the tensor lives."""

    def __init__(self, tensor, note):
        self.tensor = (tensor.data_ptr(), tensor.dtype, geometry_of(tensor))
        self.references = [reference_to(tensor)] if note is None else note.references
        self.is_assumed = note is not None and note.is_assumed

    @classmethod
    def of_storage(cls, tensor, note):
        """The content of the memory of the tensor that was noted, of which this tensor is a part."""
        memory = cls(tensor, note)
        address = address_of(tensor) + note.geometry[0] * tensor.element_size()
        memory.tensor = (address, tensor.dtype, note.geometry)
        return memory

    def evaluate(self, memo):
        if all(one.expired() for one in self.references):
            raise Unavailable
        address, dtype, (_, shape, stride) = self.tensor
        return at_address(address, dtype, shape, stride).clone()


class Values(Expression):
    """Values that were copied."""

    def __init__(self, values, is_assumed=False):
        self.kept = values
        self.is_assumed = is_assumed


class Constant(Expression):
    """The same number for all elements."""

    def __init__(self, number, shape, dtype):
        self.arguments = (shape, number)
        self.dtype = dtype

    def evaluate(self, memo):
        return torch.full(*self.arguments, dtype=self.dtype, device=CPU)


class Guess(Expression):
    """A comparison of unknown numbers.

    With the policy `half`, exactly every second element is true. Which ones follows from `key`, what is compared, and `is_opposite`
    exchanges them: so a comparison and its opposite divide the elements, and others are independent of it.
    """

    is_assumed = True

    def __init__(self, key, is_opposite, shape):
        self.key, self.is_opposite, self.shape = key, is_opposite, shape
        self.cost = math.prod(shape)

    def evaluate(self, memo):
        if policy != HALF:
            return torch.full(self.shape, policy == FULL, dtype=torch.bool, device=CPU)
        count = math.prod(self.shape)
        generator.manual_seed(hash(self.key) & 0xFFFFFFFF)
        # One of each pair of elements; the first of them where a single one is left.
        first = torch.randint(0, 2, ((count + 1) // 2, ), generator=generator, dtype=torch.uint8, device=CPU).bool()
        chosen = torch.stack([first, ~first], dim=1).flatten()[:count].view(self.shape)
        return ~chosen if self.is_opposite else chosen


def in_storage(value, geometry):
    """A flat host tensor with the elements of a value where a tensor with this geometry has them, from its first one on."""
    _, shape, stride = geometry
    flat = torch.empty(span_of(shape, stride), dtype=value.dtype, device=CPU)
    flat.as_strided(shape, stride).copy_(value)
    return flat


class View(Expression):
    """Elements of another expression, whose tensor had the first geometry, in the order of the second one."""

    def __init__(self, base, geometry, own):
        self.base, self.geometry, self.own = base, geometry, own
        self.cost, self.depth, self.operators = base.cost, base.depth + 1, base.operators + 1
        self.is_assumed = base.is_assumed

    def evaluate(self, memo):
        offset, shape, stride = self.own
        flat = in_storage(self.base.value(memo), self.geometry)
        first = offset - self.geometry[0]
        if first < 0 or first + span_of(shape, stride) > len(flat):
            raise Unavailable
        return flat.as_strided(shape, stride, first)


class Update(Expression):
    """An expression of which a part was overwritten with another one."""

    def __init__(self, base, geometry, part, part_geometry):
        self.base, self.geometry, self.part, self.part_geometry = base, geometry, part, part_geometry
        self.cost = base.cost + part.cost
        self.depth, self.operators = max(base.depth, part.depth) + 1, base.operators + part.operators + 1
        self.is_assumed = base.is_assumed or part.is_assumed

    def evaluate(self, memo):
        offset, shape, stride = self.geometry
        part_offset, part_shape, part_stride = self.part_geometry
        flat = in_storage(self.base.value(memo), self.geometry)
        flat.as_strided(part_shape, part_stride, part_offset - offset).copy_(self.part.value(memo))
        return flat.as_strided(shape, stride)


class Operator(Expression):
    """One result of an operator: the one at a position in the list of its results.

    `arguments` are those of the operator, with expressions where tensors on a device are. `outputs` are the names of those that it only
    writes, with the shape and the type of each.
    """

    def __init__(self, call, position, shape):
        self.call, self.position, self.shape = call, position, shape
        self.cost, self.depth, self.operators, self.is_assumed = call.cost, call.depth, call.operators, call.is_assumed

    def evaluate(self, memo):
        if id(self.call) not in memo:
            memo[id(self.call)] = self.call.run(memo)
        value = memo[id(self.call)][self.position]
        if value.shape != self.shape:
            raise Unavailable
        return value


class Call:
    """An operator with its arguments, of which each result is an `Operator`."""

    def __init__(self, overload, arguments, outputs, updated, inputs, own_cost):
        self.overload, self.arguments, self.outputs, self.updated = overload, arguments, outputs, updated
        self.cost = own_cost + sum(one.cost for one in inputs)
        self.depth = 1 + max((one.depth for one in inputs), default=0)
        self.operators = 1 + sum(one.operators for one in inputs)
        self.is_assumed = any(one.is_assumed for one in inputs)
        is_random = torch.Tag.nondeterministic_seeded in overload.tags
        self.seed = next_seed() if is_random else None

    def is_cheap(self):
        """Whether it may be computed."""
        return self.cost <= MAX_COST and self.depth <= MAX_DEPTH and self.operators <= MAX_OPERATORS

    def run(self, memo):
        """The results on the host."""
        arguments = {}
        for name, value in self.arguments.items():
            if name in self.outputs:
                shape, dtype = self.outputs[name]
                arguments[name] = torch.empty(shape, dtype=dtype, device=CPU)
            elif name in self.updated:
                arguments[name] = evaluated(value, memo, lambda one: one.clone())
            else:
                arguments[name] = evaluated(value, memo, lambda one: one)
        return run_on_host(self.overload, arguments, self.seed)


# The source of seeds: each operator that makes random numbers has its own.
seeds = random.Random(0)


def next_seed():
    """A seed for one operator."""
    return seeds.getrandbits(62)


def evaluated(value, memo, function):
    """An argument with host tensors in the place of expressions."""
    if isinstance(value, Expression):
        return function(value.value(memo))
    if isinstance(value, (list, tuple)):
        return [evaluated(one, memo, function) for one in value]
    return value


def run_on_host(overload, arguments, seed):
    """The tensors that an operator returns on the host, and those that it updates if it returns nothing."""
    names = {argument.name for argument in overload._schema.arguments}
    if "generator" in names:
        if seed is not None:
            generator.manual_seed(seed)
        arguments["generator"] = generator
        result = overload(**arguments)
    elif seed is not None:
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            result = overload(**arguments)
        finally:
            torch.set_rng_state(state)
    else:
        result = overload(**arguments)
    if not overload._schema.returns:
        result = [arguments[argument.name] for argument in overload._schema.arguments if is_written(argument)]
    return with_storage(result)


def is_written(argument):
    """Whether an operator writes an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def flattened(value, found):
    """Appends the tensors among the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            flattened(one, found)
    return found


def with_storage(value):
    """The tensors among the results of an operator that have a storage. Others, such as sparse ones, have no values here."""
    return [one for one in flattened(value, []) if one.layout is torch.strided]


def of_view(note, tensor):
    """The expression of a tensor whose storage has a note with an expression."""
    own = geometry_of(tensor)
    return note.expression if own == note.geometry else View(note.expression, note.geometry, own)


def cost_of(overload, args, inputs, results):
    """The cost of one call of an operator, without that of its inputs."""
    largest = max((one.numel() for one in results), default=0)
    elements = largest + sum(one.numel() for one in inputs)
    # It may be a product of matrices. The number of its multiplications is the root of the product of the sizes M*K, K*N and M*N.
    sizes = sorted((one.numel() for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()), reverse=True)
    if len(sizes) > 1 and torch.Tag.pointwise not in overload.tags:
        return max(elements, math.isqrt(sizes[0] * sizes[1] * largest))
    return elements
