"""Runs a program and writes which tensors exist at some samples, from Python's objects: the truth for categories.

    python walked.py PROGRAM [ARGUMENT]...

The samples are the ends of the first optimizer steps, and of the first calls of outermost modules that record a graph.
Each line of the file `WALKED` is one sample, as JSON: its time in nanoseconds since the epoch, and by kind of tensor the
addresses of the storages.

- `parameter`: parameters, buffers of modules, and what optimizers update
- `gradient`: their `grad`
- `optimizer_state`: the state of all optimizers
- `activation`: what the graph of the call has saved, computed by the call
"""

import gc
import json
import os
import runpy
import sys
import time

SAMPLES = 4
_samples = {"step": 0, "call": 0}


def _address(tensor):
    if not tensor.is_cuda:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _tensors(value, depth=0):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth + 1)


def _objects():
    """The addresses by kind, from Python's objects."""
    import torch

    kinds = {"parameter": set(), "gradient": set(), "optimizer_state": set()}
    for value in gc.get_objects():
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if issubclass(kind, torch.nn.Parameter):
                kinds["parameter"].add(_address(value))
            if value.is_leaf and value.grad is not None:
                kinds["gradient"].add(_address(value.grad))
        elif issubclass(kind, torch.nn.Module):
            tensors = [*value.__dict__.get("_parameters", {}).values(), *value.__dict__.get("_buffers", {}).values()]
            for tensor in (tensor for tensor in tensors if tensor is not None):
                kinds["parameter"].add(_address(tensor))
        elif issubclass(kind, torch.optim.Optimizer):
            for tensor in _tensors([group["params"] for group in value.__dict__.get("param_groups", [])]):
                kinds["parameter"].add(_address(tensor))
            for tensor in _tensors(list(value.__dict__.get("state", {}).values())):
                kinds["optimizer_state"].add(_address(tensor))
    return kinds


def _graph(outputs):
    """The addresses that a graph has saved and that operations with gradients computed."""
    import torch

    saved, nodes, seen = set(), [t.grad_fn for t in _tensors(outputs) if t.grad_fn is not None], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        nodes += [follows for follows, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    values = list(_tensors(getattr(node, name)))
                except RuntimeError:
                    continue
                saved.update(_address(t) for t in values if t.grad_fn is not None and t._base is None)
    return saved


def _write(kinds):
    kinds = {kind: sorted(filter(None, addresses)) for kind, addresses in kinds.items()}
    with open(os.environ["WALKED"], "a") as file:
        time.sleep(0.01)
        print(json.dumps({"pid": os.getpid(), "ns": time.time_ns(), **kinds}), file=file)
        time.sleep(0.01)


def _before_step(optimizer, args, kwargs):
    global _steps
    _steps += 1


def _after_step(optimizer, args, kwargs):
    global _steps
    import torch

    _steps -= 1
    if _samples["step"] < SAMPLES and not torch.cuda.is_current_stream_capturing():
        _samples["step"] += 1
        _write(_objects())


_depth = 0
# The optimizer steps that are running. Inside one, what becomes its state can be in local variables still.
_steps = 0


def _before_call(module, args):
    global _depth
    _depth += 1


def _after_call(module, args, output):
    global _depth
    import torch

    _depth = max(_depth - 1, 0)
    if _depth == 0 and _steps == 0 and _samples["call"] < SAMPLES and not torch.cuda.is_current_stream_capturing():
        saved = _graph(output if not hasattr(output, "__dict__") else vars(output))
        if saved:
            _samples["call"] += 1
            kinds = _objects()
            kinds["activation"] = saved - kinds["parameter"]
            _write(kinds)


def main():
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    torch.nn.modules.module.register_module_forward_pre_hook(_before_call)
    torch.nn.modules.module.register_module_forward_hook(_after_call, always_call=True)
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
