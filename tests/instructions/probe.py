"""Runs one case: `probe.py LIBRARIES CASE N ORACLE`.

Makes events from a Python stack of a known depth: N/4 steps uncounted, then N steps and 2 N steps counted. Writes the
events that memtrace must record to ORACLE.

The stand-ins are called with the GIL held, as PyTorch's own module calls its allocator. Repeated calls come from the
same line, because a new stack costs more than a known one.
"""
import ctypes
import os
import sys
from sys import _getframe as frame

libraries, case, n, oracle_path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
ROUNDS = ((n // 4, None), (n, "n"), (2 * n, "2n"))
ALL = sum(times for times, _ in ROUNDS)


def library(name):
    return ctypes.PyDLL(os.path.join(libraries, name))


def function(owner, name):
    found = owner[name]
    found.restype = None
    return found


oracle = library("liboracle.so")
begin, end, at, node = (function(oracle, f) for f in ("count_begin", "count_end", "oracle_at", "oracle_node"))
library("libc10.so")
library("libtorch_cuda.so")
cuda = library("libc10_cuda.so")
alloc, free, pairs = (function(cuda, f) for f in ("cuda_alloc", "cuda_free", "cuda_pairs"))


def counted(name, work, *arguments):
    """Runs `work(*arguments)` and counts its instructions under `name`; an empty name counts nothing."""
    if name:
        begin()
    work(*arguments)
    if name:
        end(name.encode())


def frames(innermost):
    """The number of frames from `innermost` to the root."""
    count = 0
    while innermost:
        count, innermost = count + 1, innermost.f_back
    return count


def mark():
    """Notes that the next events come from the line that calls this function."""
    here = frame(1)
    at(frames(here), here.f_lineno)


def down(levels, leaf, times):
    """Calls `leaf(times)` below `levels` frames of this function."""
    if levels > 1:
        down(levels - 1, leaf, times)
    else:
        leaf(times)


def every_round(leaf, depth):
    """Calls `leaf(times)` once per round, so that its frame is the `depth`th."""
    levels = depth - frames(frame()) - 2  # less `counted` and the leaf itself
    for times, name in ROUNDS:
        counted(name, down, levels, leaf, times)


def calling(call, depth):
    """One C call makes all the events."""
    def leaf(times):
        mark(), call(times)

    every_round(leaf, depth)


def two_lines(depth):
    """Allocates on one line and frees on the next."""
    def leaf(times):
        for _ in range(times):
            mark(), alloc(1000)
            mark(), free()

    every_round(leaf, depth)


def two_callees(depth):
    """Allocates in one function and frees in another."""
    def make():
        mark(), alloc(1000)

    def drop():
        mark(), free()

    def leaf(times):
        for _ in range(times):
            make()
            drop()

    every_round(leaf, depth - 1)


def new_callees(depth):
    """Makes every pair in a function that was never called before."""
    made = {"mark": mark, "pairs": pairs}
    source = "".join(f"def made_{i:05}():\n    mark(), pairs(1)\n" for i in range(ALL))
    exec(compile(source, "made.py", "exec"), made)
    functions = iter([made[f"made_{i:05}"] for i in range(ALL)])

    def leaf(times):
        for _ in range(times):
            next(functions)()

    every_round(leaf, depth - 1)


MODULE = """
class Module:
    def __init__(self, work):
        self.work = work

    def _wrapped_call_impl(self, *arguments):
        return self._call_impl(*arguments)

    def _call_impl(self, *arguments):
        return self.forward(*arguments)

    __call__ = _wrapped_call_impl

    def forward(self, times):
        self.work(times)
"""
NESTED = 4


def module(work):
    """Calls `work(times)` inside NESTED modules. Each adds 3 frames, the innermost of which calls `work`."""
    made = {}
    exec(compile(MODULE, "/site-packages/torch/nn/modules/module.py", "exec"), made)
    for kind in ("Linear", "Attention", "Block", "Model"):
        work = type(kind, (made["Module"],), {})(work)
    return work


def in_modules(depth):
    """One C call makes all the events, inside a module's call."""
    def leaf(times):
        mark(), pairs(times)

    every_round(module(leaf), depth - 3 * NESTED)


def in_blocks(depth):
    """Makes every pair in the call of another module of the same class, from the same line."""
    def leaf(times):
        mark(), pairs(times)

    blocks = [module(leaf), module(leaf)]

    def work(times):
        for n in range(times):
            blocks[n % 2](1)

    every_round(work, depth - 3 * NESTED - 1)


def nodes(counted_pass, depth):
    """Forward makes nodes and backward runs them. `counted_pass` names the pass that is counted."""
    autograd = library("libtorch_cpu.so")
    make, run, nodes_work = (function(autograd, f) for f in ("make_nodes", "run_nodes", "nodes_work"))
    made_at = None

    def making(times):
        nonlocal made_at
        made_at = frame().f_lineno; make(times)

    mark(), pairs(1)  # recording begins
    if counted_pass == "forward":
        every_round(making, depth)
    else:
        down(depth - frames(frame()) - 1, making, ALL + 1)
        every_round(run, depth)
    # One more node makes and drops a tensor. Its events must belong to the forward stack of that node.
    nodes_work(cuda.cuda_pairs)
    node(depth, made_at), mark(), run(1)


kind, _, depth = case.rpartition("-")
depth = int(depth)
if kind == "cuda" and depth == 1:
    # Depth 1: the events come from the module's own frame.
    for times, name in ROUNDS:
        if name:
            begin()
        mark(), pairs(times)
        if name:
            end(name.encode())
elif kind == "cuda":
    calling(pairs, depth)
elif kind == "lines":
    two_lines(depth)
elif kind == "callees":
    two_callees(depth)
elif kind == "new":
    new_callees(depth)
elif kind == "modules":
    in_modules(depth)
elif kind == "blocks":
    in_blocks(depth)
elif kind in ("driver", "runtime"):
    calling(function(library("libcalls.so"), f"{kind}_pairs"), depth)
elif kind == "cpu":
    calling(function(library("libc10.so"), "cpu_pairs"), depth)
elif kind in ("forward", "backward"):
    nodes(kind, depth)
else:
    sys.exit(f"no such case: {case}")
if oracle.oracle_write(oracle_path.encode()) != 0:
    sys.exit(f"cannot write {oracle_path}")
