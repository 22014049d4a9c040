"""Allocates with PyTorch, beside stand-ins for CuPy and JAX. With XLA_FLAGS, it writes a dump as XLA does."""

import atexit
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cupy
import jax._src.xla_bridge  # noqa: F401
import torch

x = torch.empty(1 << 20, device="cuda")
for _ in range(1000):
    pass
if os.fork() == 0:
    # A forked child asks the libraries nothing when it ends.
    atexit._run_exitfuncs()
    os._exit(0)
os.wait()
for flag in os.environ.get("XLA_FLAGS", "").split():
    if flag.startswith("--xla_dump_to="):
        shutil.copytree(sys.argv[1], flag.partition("=")[2])
variables = ["XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"]
print(type(getattr(cupy.cuda.get_allocator(), "__self__", None)).__name__, *(os.environ.get(v) for v in variables))
