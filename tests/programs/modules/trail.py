"""The expected recording of `nn.Module` calls, found with PyTorch's own means and without memtrace.

`start(**roots)` observes calls; `finish()` writes JSON to the file MEMTRACE_TEST_TRAIL. Without it both do nothing:

- "sizes": the sizes of all allocated blocks, in order, from PyTorch's recorder;
- "trail": an entry at each change: [number of allocated blocks, running autograd node or null, modules: [path, class]].
  The modules are those being called, or those whose call made the node, outermost first.

Forward hooks give the called modules. Walks of the graph from a module's inputs and outputs give the nodes; the called
module made each new one. Made for one computing thread; backward runs on autograd's thread.
"""

import json
import os

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

PATH = os.environ.get("MEMTRACE_TEST_TRAIL")
MAKERS = {}
called = []
node = None
trail = []
roots = {}

if PATH:
    torch.cuda.memory._record_memory_history(max_entries=10**7, stacks="python")


def count():
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def name(module):
    """The path of a module in the first root that contains it, else the program's `known_as`."""
    for root, model in roots.items():
        for path, candidate in model.named_modules():
            if candidate is module:
                return f"{root}.{path}" if path else root
    return getattr(module, "known_as", "?")


def note():
    who = [[name(m), type(m).__name__] for m in called]
    trail.append([count(), None, who] if node is None else [count(), node[0], node[1]])


def before(module, arguments):
    claim(arguments)
    called.append(module)
    note()


def after(module, arguments, output):
    claim(output)
    assert called.pop() is module
    note()


def claim(output):
    """Assigns the nodes of a graph that were not seen before to the modules being called now."""
    who = [[name(m), type(m).__name__] for m in called]
    outputs = output if isinstance(output, (tuple, list)) else [output]
    todo = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while todo:
        fn = todo.pop()
        if fn is None or fn in MAKERS:
            continue
        MAKERS[fn] = who
        fn.register_prehook(lambda grads, fn=fn, who=who: runs(fn.name(), who))
        todo.extend(next for next, _ in fn.next_functions)


def runs(kind, who):
    global node
    node = (kind.split("::")[-1], who)
    note()


def backward(loss):
    """Runs the backward pass; the cases call it instead of `loss.backward()`."""
    global node
    if PATH:
        claim(loss)
    loss.backward()
    if PATH:
        node = None
        note()
        MAKERS.clear()


def start(**models):
    if PATH:
        roots.update(models)
        register_module_forward_pre_hook(before)
        register_module_forward_hook(after, always_call=True)
        note()


def finish():
    if PATH:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        sizes = [e["size"] for e in traces[torch.cuda.current_device()] if e["action"] == "alloc"]
        with open(PATH, "w") as f:
            json.dump({"sizes": sizes, "trail": trail}, f)
