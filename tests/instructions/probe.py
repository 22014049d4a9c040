"""One case: `probe.py LIBRARIES CASE N ORACLE` makes events from a Python stack of a known depth, N/4 times uncounted, N times and 2 N times
counted, and writes what must have been recorded to ORACLE.

The stand-ins are called with the GIL held, as PyTorch's own module calls its allocator. Whatever is called twice is called from the
same line: a stack that is new costs more than one that is known.
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
    """Runs `work(*arguments)`, counted under this name."""
    if name:
        begin()
    work(*arguments)
    if name:
        end(name.encode())


def frames(innermost):
    """How many frames there are from this one to the root."""
    count = 0
    while innermost:
        count, innermost = count + 1, innermost.f_back
    return count


def mark():
    """Notes that the next events come from where this is called."""
    here = frame(1)
    at(frames(here), here.f_lineno)


def down(levels, leaf, times):
    """Calls `leaf(times)` from so many frames of this function."""
    if levels > 1:
        down(levels - 1, leaf, times)
    else:
        leaf(times)


def every_round(leaf, depth):
    """Calls `leaf(times)` for every round, its frame being the `depth`th."""
    levels = depth - frames(frame()) - 2  # less `counted` and the leaf itself
    for times, name in ROUNDS:
        counted(name, down, levels, leaf, times)


def calling(call, depth):
    """One call of C that makes all the events."""
    def leaf(times):
        mark(), call(times)

    every_round(leaf, depth)


def two_lines(depth):
    """Made on one line, dropped on the next."""
    def leaf(times):
        for _ in range(times):
            mark(), alloc(1000)
            mark(), free()

    every_round(leaf, depth)


def two_callees(depth):
    """Made in one function, dropped in another."""
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
    """Every pair in a function that was never called before."""
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
    """Calls `work(times)` from within so many modules: 3 frames each, the innermost of which is `work`'s caller."""
    made = {}
    exec(compile(MODULE, "/site-packages/torch/nn/modules/module.py", "exec"), made)
    for kind in ("Linear", "Attention", "Block", "Model"):
        work = type(kind, (made["Module"],), {})(work)
    return work


def in_modules(depth):
    """One call of C that makes all the events, in the call of a module."""
    def leaf(times):
        mark(), pairs(times)

    every_round(module(leaf), depth - 3 * NESTED)


def in_blocks(depth):
    """Every pair in the call of another module of the same class, from the same line."""
    def leaf(times):
        mark(), pairs(times)

    blocks = [module(leaf), module(leaf)]

    def work(times):
        for n in range(times):
            blocks[n % 2](1)

    every_round(work, depth - 3 * NESTED - 1)


def nodes(counted_pass, depth):
    """Nodes are made by forward and run by backward: one of the two is counted."""
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
    # One more, which makes and drops a tensor: do its events belong to a node that was made there?
    nodes_work(cuda.cuda_pairs)
    node(depth, made_at), mark(), run(1)


kind, _, depth = case.rpartition("-")
depth = int(depth)
if kind == "cuda" and depth == 1:
    # From the module itself.
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
