"""Kernels that programs compile when they first need them. A dry run goes on without them, because no kernel runs: their functions do
nothing, and their calls are counted.

FlashInfer, SGLang and DeepGEMM compile with nvcc. Real GPUs often have the CUDA toolkit or compiled kernels, and the machine of a dry
run has neither. What these functions allocate themselves is missing. CUTLASS's Python DSL has a compiler of its own, and a CUDA runtime of its own, which
needs a real driver.
"""

import os
import shutil


class Calls:
    """The calls of missing functions, in the file of `simulate/src/missing.rs`: one line a function, which is overwritten in place."""

    WIDTH = 20

    def __init__(self, template):
        self.template = template
        self.process = None

    def add(self, name):
        if not self.template:
            return
        if self.process != os.getpid():
            self.process, self.calls, self.length = os.getpid(), {}, 0
            # Beside the file of the driver.
            path = self.template.replace("%p", f"{self.process}.kernels")
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        offset, count = self.calls.get(name, (self.length, 0))
        self.calls[name] = (offset, count + 1)
        line = f"{count + 1:>{self.WIDTH}} {name}\n".encode()
        os.pwrite(self.file, line, offset)
        if count == 0:
            self.length += len(line)


calls = Calls(os.environ.get("SIMCUDA_MISSING"))


class MissingModule:
    """A module of kernels that is not compiled. Each of its functions returns None."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, function):
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args, **kwargs):
            calls.add(f"{self.name}.{function}")
            if "sampling_from" in function:
                choose_tokens(args)

        setattr(self, function, call)
        return call


class NotCompiled:
    """A kernel of CUTLASS's DSL that is not compiled. It can be called, bound to a device and exported."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        calls.add(f"cutlass.{self.name}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def choose_tokens(args):
    """Writes tokens where a kernel would have: from the middle, where no vocabulary has special tokens. `args` begin with the
    probabilities and the tokens.
    """
    import torch

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    numbers = next((one for one in tensors if one.is_floating_point()), None)
    tokens = next((one for one in tensors if one.dtype in (torch.int32, torch.int64)), None)
    if numbers is not None and tokens is not None:
        tokens.fill_(numbers.shape[-1] // 2)


def has_nvcc():
    """Whether FlashInfer and SGLang find nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=os.path.join(home or "/usr/local/cuda", "bin")) is not None or (
        not home and shutil.which("nvcc") is not None
    )


def install_cutlass_compile(compiler):
    """Replaces kernels that `cute.compile` would make. `compiler` is the module `cutlass.base_dsl.compiler`."""

    def not_compiled(_, function, *args, **kwargs):
        return NotCompiled(getattr(function, "__qualname__", type(function).__qualname__))

    compiler.CompileCallable.__call__ = not_compiled


def install_cutlass_calls(executor):
    """Calls of `@cute.jit` functions compile them, too, and do not run them. `executor` is the module
    `cutlass.base_dsl.jit_executor`.
    """

    def call(function, *args, **kwargs):
        calls.add(f"cutlass.{function.function_name}")

    executor.JitCompiledFunction.__call__ = call


def install_flashinfer(core):
    """Replaces kernels that cannot be compiled. `core` is the module `flashinfer.jit.core`."""
    own = core.JitSpec.build_and_load

    def build_and_load(spec, *args, **kwargs):
        try:
            return own(spec, *args, **kwargs)
        except Exception:
            is_forbidden = os.environ.get("FLASHINFER_DISABLE_JIT")
            if is_forbidden or not hasattr(spec, "write_ninja") or has_nvcc():
                raise
            return MissingModule(f"flashinfer.{spec.name}")

    core.JitSpec.build_and_load = build_and_load


def instead_of(module, error):
    """DeepGEMM asserts a CUDA toolkit when it is imported, also for models without FP8. SGLang takes other kernels where it is not
    installed, but not where its import fails with another exception than that.
    """
    from . import exceptions

    if module != "deep_gemm" or has_nvcc() or not exceptions.needs_toolkit(error):
        return None
    calls.add("deep_gemm.all")
    return ImportError("DeepGEMM needs the CUDA toolkit, which this machine lacks", name=module)


def install_sglang(loader):
    """Replaces kernels that cannot be compiled. `loader` is the module that defines `load_jit`."""
    own = getattr(loader, "load_jit", None)
    if own is None:
        return

    def load_jit(*names, **kwargs):
        try:
            return own(*names, **kwargs)
        except Exception:
            if os.environ.get("SGLANG_CRASH_ON_JIT_COMPILE") or has_nvcc():
                raise
            return MissingModule(f"sglang.{'_'.join(map(str, names))}")

    loader.load_jit = load_jit
