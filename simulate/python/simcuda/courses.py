"""Finds the branches and sizes that a number decides after the program has read it from a device.

Nothing follows a number of Python. So the source code is read: a number decides a branch if it is in the test of an `if`, a `while` or a
conditional expression, or is assigned to a name that is. It decides a size if it is in an index or an argument of a function that makes or
shapes tensors. A number that is only printed decides nothing.
"""

import ast
import functools
import itertools
import linecache
import os
import sys
import typing

import torch

from . import exceptions

BRANCH, SIZE = "branch", "size"

# Functions whose arguments are sizes.
SIZED_CALLS = frozenset("""
    range arange empty zeros ones full rand randn randint new_empty new_zeros new_ones new_full expand repeat repeat_interleave view reshape
    narrow split chunk pad resize_ linspace eye islice one_hot interpolate
""".split())
# Functions of a number in a test whose answer is that of a healthy run, whatever the number.
CERTAIN_CALLS = frozenset("isnan isfinite isinf isinstance len hasattr".split())
# The files of PyTorch in which a method of a tensor reads for its caller, and those whose reads decide nothing but text and errors.
TENSOR_METHODS = os.path.join("torch", "_tensor.py")
HARMLESS = tuple(os.path.join("torch", *parts) for parts in (
    ("_tensor_str.py", ), ("amp", "grad_scaler.py"), ("distributions", ), ("optim", "lr_scheduler.py"), ("utils", "tensorboard")))
# The most frames in which a returned number is followed.
MAX_FRAMES = 8


class Decision(typing.NamedTuple):
    """A line that a number decides, as (file, line), the kind, and the class of the optimizer that asked. Such an optimizer goes on to its limits."""

    location: tuple
    kind: str
    optimizer: str = None


def decision_of_read():
    """The decision that follows from the number that is being read, or None."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(exceptions.OWN[1]):
        frame = frame.f_back
    inner = None
    while frame is not None and exceptions.is_own(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if any(part in file for part in HARMLESS):
            return None
        optimizer = frame.f_locals.get("self") if f"{os.sep}optim{os.sep}" in file else None
        if isinstance(optimizer, torch.optim.Optimizer):
            place = exceptions.line_of_program()
            return Decision(place, BRANCH, type(optimizer).__name__) if place else None
        if not file.endswith(TENSOR_METHODS):
            inner = frame
        frame = frame.f_back
    if inner is not None and frame is not None:
        return Decision((frame.f_code.co_filename, frame.f_lineno), BRANCH)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        found = decision_at(frame.f_code.co_filename, position_of(frame))
        if found is not RETURNED:
            return found
        frame = frame.f_back
        while frame is not None and exceptions.is_own(frame.f_code.co_filename):
            frame = frame.f_back
    return None


def position_of(frame):
    """The first and the last line of the expression that a frame computes, and where it begins and ends in them, or None before Python 3.11."""
    line = frame.f_lineno
    if not hasattr(frame.f_code, "co_positions"):
        return line, line, None, None
    first, last, begin, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return first or line, last or line, begin, end


# The function returns the number.
RETURNED = object()


@functools.lru_cache(maxsize=4096)
def decision_at(file, position):
    """The decision that follows from the number of the expression at a position, None, or RETURNED."""
    scope = scope_of(file, position[0])
    statement = None if scope is None else statement_at(scope, position[0])
    if statement is None:
        return None
    is_read = functools.partial(contains, position)
    found = decision_in(file, statement, is_read)
    if found is not None:
        return found
    names = assigned_by(statement, is_read)
    # Those that follow come first.
    statements = sorted((one for one in ast.walk(scope) if isinstance(one, ast.stmt)),
                        key=lambda one: (one.lineno < position[0], one.lineno))
    # Names that get what another one has.
    for _ in range(4):
        more = set(names)
        for one in statements:
            more |= assigned_by(one, functools.partial(mentions, names))
        if more == names:
            break
        names = more
    uses = functools.partial(mentions, names)
    if names:
        for one in statements:
            found = decision_in(file, one, uses)
            if found is not None:
                return found
    returns = [one.value for one in statements if isinstance(one, ast.Return) and one.value is not None]
    return RETURNED if any(is_read(one) or uses(one) for one in returns) else None


def decision_in(file, statement, is_used):
    """The decision of a statement in which an expression that `is_used` accepts decides something, or None. Blocks in it are other statements."""
    is_check = isinstance(statement, ast.Assert) or isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise)
    for node in own_nodes(statement):
        test = node.test if isinstance(node, (ast.If, ast.While, ast.IfExp)) else None
        if test is not None and not is_check and is_decided(test, is_used):
            return Decision((file, test.lineno), BRANCH)
        sizes = []
        if isinstance(node, ast.Call) and name_of(node.func) in SIZED_CALLS:
            sizes = [*node.args, *(one.value for one in node.keywords)]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            sizes = [node.slice]
        if any(is_used(one) for one in sizes):
            return Decision((file, node.lineno), SIZE)
    return None


def is_decided(test, is_used):
    """Whether the answer of a test depends on an expression."""
    if isinstance(test, ast.BoolOp):
        return any(is_decided(one, is_used) for one in test.values)
    if isinstance(test, ast.UnaryOp):
        return is_decided(test.operand, is_used)
    if isinstance(test, ast.Compare) and all(isinstance(one, (ast.Is, ast.IsNot)) for one in test.ops):
        return False
    if isinstance(test, ast.Call) and name_of(test.func) in CERTAIN_CALLS:
        return False
    return is_used(test)


def assigned_by(statement, is_used):
    """The names, or attributes, that a statement gives a value that follows from an expression."""
    targets, value = [], getattr(statement, "value", None)
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and name_of(value.func) in ("append", "add", "extend"):
        targets, value = [value.func.value], ast.Tuple(value.args)
    if value is None or not any(is_used(one) for one in getattr(value, "elts", [value])):
        return set()
    return {ast.unparse(one) for target in targets for one in getattr(target, "elts", [target]) if isinstance(one, (ast.Name, ast.Attribute))}


def mentions(names, node):
    """Whether an expression has one of the names."""
    return any(isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) in names for one in ast.walk(node))


def covers(line, node):
    """Whether a line is in a node."""
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or -1)


def contains(position, node):
    """Whether the expression at a position is a node, or a part of it."""
    first, last, begin, end = position
    if begin is None or end is None:
        return covers(first, node)
    return (node.lineno, node.col_offset) <= (first, begin) and (last, end) <= (node.end_lineno, node.end_col_offset)


def name_of(function):
    """The last part of the name of a function that is called, or None."""
    return getattr(function, "attr", getattr(function, "id", None))


def own_nodes(statement):
    """The nodes of a statement without those of the statements in it."""
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt)]


@functools.lru_cache(maxsize=256)
def tree_of(file):
    """The syntax tree of a source file, or None."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def scope_of(file, line):
    """The innermost function that has a line, or the module; None without source."""
    tree = tree_of(file)
    if tree is None:
        return None
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and covers(line, one)]
    return max(functions, key=lambda one: one.lineno, default=tree)


def statement_at(scope, line):
    """The innermost statement of a scope that has a line, or None."""
    found = [one for one in ast.walk(scope) if isinstance(one, ast.stmt) and one is not scope and covers(line, one)]
    return max(found, key=lambda one: (one.lineno, -(one.end_lineno or 0)), default=None)
