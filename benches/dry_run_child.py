"""Runs a program in this process and writes what it needed of each device.

    dry_run_child.py --result FILE [--limit BYTES] [--tracker | --estimate] PROGRAM [ARGUMENT...]

FILE gets one JSON object; `%r` in its name is the rank. Without more options nothing is imported before the program, and
its peaks are PyTorch's own. `--limit` first limits what PyTorch may reserve of each device. `--tracker` runs the program
under FakeTensorMode and MemTracker, as far as these get. `--estimate` stops at the first call of a module, and applies accelerate's estimate
to the modules that exist then. The exit status is 0 if FILE was written.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import runpy
import sys
import time
import traceback

PACKAGES = ["torch", "torchvision", "transformers", "accelerate", "timm", "peft", "pytorch_lightning", "triton"]


class Found(BaseException):
    """Ends the program at the first call of a module; programs do not catch it."""


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", required=True)
    parser.add_argument("--limit", type=int)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--tracker", action="store_true")
    way.add_argument("--estimate", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def limit_memory(limit):
    import torch

    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory, device)


def short(path, program):
    """A path without the folder of installed packages or of the programs."""
    return path.rpartition("-packages/")[2].removeprefix(os.path.dirname(program) + "/")


def failure(error, program):
    """The exception, the line of the program's own file that was executing, and the innermost line of any file."""
    # The modules of a dry run that stand in for kernels are no part of what the program calls.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/simcuda/" not in frame.filename]
    lines = [frame.lineno for frame in frames if os.path.realpath(frame.filename) == program]
    innermost = f"{short(frames[-1].filename, program)}:{frames[-1].lineno}" if frames else None
    return {"type": type(error).__name__, "message": str(error)[:400], "line": lines[-1] if lines else None, "innermost": innermost,
            "traceback": "".join(traceback.format_exception(error))[-8000:]}


def devices():
    """PyTorch's peaks of each device that the program used, and what it holds outside PyTorch if no other process is on the device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = []
    for device in range(torch.cuda.device_count()):
        statistics = torch.cuda.memory_stats(device)
        if statistics.get("allocation.all.allocated"):
            free, total = torch.cuda.mem_get_info(device)
            found.append({"device": device, "allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device),
                          "retries": statistics["num_alloc_retries"], "ooms": statistics["num_ooms"],
                          "outside": total - free - torch.cuda.memory_reserved(device), "total": total})
    return found


def move_parameters(module, fn, recurse=True):
    """Does the work of nn.Module._apply, with new parameters.

    `_apply` swaps fake tensors, which PyTorch refuses for tensors with weak references: most calls of `Module.to` would fail under FakeTensorMode.
    """
    import torch

    moved = {}
    for inner in module.modules() if recurse else [module]:
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    with torch.no_grad():
                        moved[parameter] = torch.nn.Parameter(fn(parameter), parameter.requires_grad)
                inner._parameters[name] = moved[parameter]
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = fn(buffer)
    return module


@contextlib.contextmanager
def tracked(result):
    """MemTracker's peak of each CUDA device, with tensors that have no memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """Goes on where MemTracker ends a program: numbers have values, and statistics of modules, which are not read, may be incomplete."""

        def _pre_fw_hook(self, module, inputs):
            # MemTracker has counted the module's parameters in its first call.
            with contextlib.suppress(NotImplementedError):
                super()._pre_fw_hook(module, inputs)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                # Optimizers count steps on the CPU, and divide by what follows from them. A GradScaler's flag is on the GPU.
                value = int(args[0].device.type == "cpu")
                return float(value) if args[0].is_floating_point() else value
            return super().__torch_dispatch__(func, types, args, kwargs)

    torch.nn.Module._apply = move_parameters
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        try:
            yield
        finally:
            peaks = tracker.get_tracker_snapshot("peak")
            result["devices"] = [{"device": device.index or 0, "allocated": sizes["Total"]} for device, sizes in peaks.items() if device.type == "cuda"]


@contextlib.contextmanager
def estimated(result):
    """accelerate's figures ("total size" and "training using Adam") for the modules of the first step."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    def stop(module, inputs):
        modules = [found for found in gc.get_objects() if isinstance(found, torch.nn.Module)]
        inner = {id(child) for found in modules for child in found.children()}
        sizes = [calculate_maximum_sizes(found)[0] for found in modules if id(found) not in inner]
        size = sum(sizes)
        training = estimate_training_usage(size, "float32")
        result["estimate"] = {"size": size, "training": max(training.values())}
        raise Found

    hook = torch.nn.modules.module.register_module_forward_pre_hook(stop)
    try:
        yield
    except Found:
        pass
    finally:
        hook.remove()


def run(options, program, result):
    with contextlib.ExitStack() as stack:
        if options.limit:
            limit_memory(options.limit)
        if options.tracker:
            stack.enter_context(tracked(result))
        elif options.estimate:
            stack.enter_context(estimated(result))
        runpy.run_path(program, run_name="__main__")


def main():
    options, start = arguments(), time.monotonic()
    program, result = os.path.realpath(options.program), {}
    sys.argv = [program, *options.arguments]
    sys.path[0] = os.path.dirname(program)
    try:
        run(options, program, result)
    except SystemExit as end:
        if end.code not in (None, 0):
            result["failure"] = failure(end, program)
    except Exception as error:
        result["failure"] = failure(error, program)
    result.setdefault("devices", devices())
    result["seconds"] = time.monotonic() - start
    result["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules}
    with open(options.result.replace("%r", os.environ.get("RANK", "0")), "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
