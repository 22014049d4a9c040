"""What a dry run adds to PyTorch, in the process of the program: the values that kernels would have computed, as far as
the size of allocations and the course of a program depend on them.

`operators` computes integers and booleans on the host and declares what depends on floating-point numbers; `values` knows
which numbers are true; `kernels` stands in for kernels that cannot be compiled; `exceptions` notes what a program died of; `steps`
ends it after some optimizer steps.
"""

import os
import sys


def after_torch():
    """PyTorch was imported. The operators follow when the process first uses CUDA."""
    import torch

    from . import exceptions, steps

    exceptions.install(os.environ.get("SIMCUDA_EXCEPTIONS"))
    steps.install(int(os.environ.get("SIMCUDA_STEPS", "0")))
    torch.cuda._lazy_call(install_operators)


def after_torchvision():
    """torchvision was imported, and with it its operators."""
    import torch

    torch.cuda._lazy_call(install_torchvision_operators)


def after_flashinfer_jit_core():
    """FlashInfer can compile kernels."""
    from . import kernels

    kernels.install_flashinfer(sys.modules["flashinfer.jit.core"])


def after_cutlass_base_dsl_compiler():
    """CUTLASS's DSL can compile kernels."""
    from . import kernels

    kernels.install_cutlass_compile(sys.modules["cutlass.base_dsl.compiler"])


def after_cutlass_base_dsl_jit_executor():
    """CUTLASS's DSL can run kernels."""
    from . import kernels

    kernels.install_cutlass_calls(sys.modules["cutlass.base_dsl.jit_executor"])


def after_sglang_kernels_jit_utils_compile_loader():
    """SGLang can compile kernels."""
    from . import kernels

    kernels.install_sglang(sys.modules["sglang.kernels.jit.utils.compile.loader"])


def install_operators():
    """The process uses CUDA."""
    from . import operators

    attempt(operators.install)


def install_torchvision_operators():
    """The process uses CUDA and torchvision."""
    from . import operators

    attempt(operators.install_torchvision)


def attempt(function):
    """Calls a function whose failure must not end the program."""
    try:
        function()
    except Exception as error:
        print(f"memtrace: values are not simulated: {error}", file=sys.stderr)
