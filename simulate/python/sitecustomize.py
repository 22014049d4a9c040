"""Python runs this module when it starts, because a dry run puts this folder first on PYTHONPATH.

It imports the module of this name that it hides, if there is one, and waits for PyTorch. It never imports PyTorch itself: a
program without it pays for this file alone.
"""

import importlib.abc
import importlib.util
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


class AfterImport(importlib.abc.MetaPathFinder):
    """Tells the package `simcuda` that a module will be imported and was, or why it could not be."""

    AWAITED = (
        "torch",
        "torchvision",
        "flashinfer.jit.core",
        "cutlass.base_dsl.compiler",
        "cutlass.base_dsl.jit_executor",
        "deep_gemm",
        "sglang.kernels.jit.utils.compile.loader",
        "sglang.kernels.jit.utils.compile",
        "sglang.jit_kernel.utils",
    )

    def __init__(self):
        self.is_searching = False

    def find_spec(self, name, path=None, target=None):
        if name not in self.AWAITED or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


class Loader(importlib.abc.Loader):
    """A module's own loader, and what comes before and after the import."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def create_module(self, spec):
        return self.own.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.own
        simcuda = load_package()
        simcuda.before_import(module)
        try:
            self.own.exec_module(module)
        except Exception as error:
            other = simcuda.instead_of(module.__name__, error)
            if other is None:
                raise
            raise other from error
        simcuda.after_import(module)


def load_package():
    """The package `simcuda` beside this file, which is not on `sys.path`."""
    if "simcuda" not in sys.modules:
        folder = os.path.join(FOLDER, "simcuda")
        spec = importlib.util.spec_from_file_location("simcuda", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
        module = sys.modules["simcuda"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["simcuda"]


def restart_for_other_torch():
    """Starts this interpreter again with libraries for its own PyTorch, if they were made for another one.

    The command of a dry run can be a script that starts an interpreter of another environment, whose PyTorch needs other libraries.
    """
    made_for, memtrace = os.environ.get("SIMCUDA_TORCH"), os.environ.get("SIMCUDA_MEMTRACE")
    old = os.environ.get("SIMCUDA_LIBRARIES")
    folders = (os.path.join(path or ".", "torch") for path in sys.path)
    own = next((folder for folder in folders if os.path.isfile(os.path.join(folder, "__init__.py"))), None)
    if made_for is None or not memtrace or not old or own is None or not sys.executable:
        return
    if made_for and os.path.isdir(made_for) and os.path.samefile(made_for, own):
        return
    import subprocess

    # Neither may load what is in the place of the driver.
    plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    answer = subprocess.run([memtrace, "simulated-libraries", sys.executable], env=plain, stdout=subprocess.PIPE, check=False)
    torch, new, *libraries = os.fsdecode(answer.stdout).splitlines() or [""] * 2
    if answer.returncode or not os.path.isdir(torch) or not os.path.samefile(torch, own):
        return
    with open("/proc/self/cmdline", "rb") as file:
        arguments = [os.fsdecode(one) for one in file.read().split(b"\0")[1:-1]]
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path and os.path.dirname(path) != old]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.update({
        "LD_PRELOAD": ":".join([*preloaded, *libraries]),
        "PYTHONPATH": os.pathsep.join(path.replace(old, new, 1) if path.startswith(old) else path for path in paths),
        "SIMCUDA_TORCH": torch,
        "SIMCUDA_LIBRARIES": new,
        "TRITON_LIBCUDA_PATH": new,
    })
    os.execv(sys.executable, [sys.executable, *arguments])


def run_hidden():
    """Runs the `sitecustomize` that the program would have had."""
    own = sys.modules.pop(__name__, None)
    try:
        spec = importlib.util.find_spec("sitecustomize")
        if spec is not None:
            module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    finally:
        sys.modules.setdefault(__name__, own)


try:
    restart_for_other_torch()
except OSError as error:
    print(f"memtrace: CUDA is simulated for another PyTorch: {error}", file=sys.stderr)
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]
sys.meta_path.insert(0, AfterImport())
run_hidden()
