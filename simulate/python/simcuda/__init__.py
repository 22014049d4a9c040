"""The additions of a dry run to PyTorch, in the process of the program: the values that kernels would have computed, as
far as the size of allocations and the course of a program depend on them.

`operators` gives the results of operators values, `expressions` computes those that something asks for later, `values` knows which are in
memory, and `guesses` notes the lines whose sizes and branches they decided, which `courses` finds in the source; `kernels` replaces kernels
that cannot be compiled; `exceptions` notes the error that ended a program; `steps` ends it after some optimizer steps. `libraries` keeps NVIDIA's own libraries out of the process.
"""

import os
import sys


def before_import(module):
    """One of the modules of `AFTER_IMPORT` will be imported. PyTorch then loads libraries."""
    from . import libraries

    if module.__name__ == "torch":
        attempt(libraries.install)


def after_torch(_):
    """PyTorch was imported. The operators follow when the process first uses CUDA."""
    import torch

    from . import exceptions, steps

    exceptions.install(os.environ.get("SIMCUDA_EXCEPTIONS"))
    steps.install(int(os.environ.get("SIMCUDA_STEPS", "0")))
    torch.cuda._lazy_call(install_operators)


def after_torchvision(_):
    """torchvision was imported, and with it its operators."""
    import torch

    torch.cuda._lazy_call(install_torchvision_operators)


def after_import(module):
    """One of the modules of `AFTER_IMPORT` was imported."""
    attempt(lambda: AFTER_IMPORT[module.__name__](module))


def instead_of(module, error):
    """The exception that the import of a module raises in place of another one, or None."""
    from . import kernels

    return kernels.instead_of(module, error)


def kernels_of(install):
    """Calls a function of `kernels` with the module that was imported."""

    def after(module):
        from . import kernels

        getattr(kernels, install)(module)

    return after


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


# Actions after the import of a module. `sitecustomize` waits for the same ones.
AFTER_IMPORT = {
    "torch": after_torch,
    "torchvision": after_torchvision,
    "flashinfer.jit.core": kernels_of("install_flashinfer"),
    "cutlass.base_dsl.compiler": kernels_of("install_cutlass_compile"),
    "cutlass.base_dsl.jit_executor": kernels_of("install_cutlass_calls"),
    # Its import alone counts.
    "deep_gemm": lambda _: None,
    # SGLang 0.5.23, 0.5.16, and 0.5.10.
    "sglang.kernels.jit.utils.compile.loader": kernels_of("install_sglang"),
    "sglang.kernels.jit.utils.compile": kernels_of("install_sglang"),
    "sglang.jit_kernel.utils": kernels_of("install_sglang"),
}
