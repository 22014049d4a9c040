"""A preloaded library that hooks dlsym sees the driver calls nested in cudaMalloc.

A library that only defines functions under the driver's names does not see them. Argument: the compiled tracer.c."""
import os
import subprocess
import sys
import tempfile

PROGRAM = """
import torch
blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
"""
out = os.path.join(tempfile.mkdtemp(), "out")
environment = {**os.environ, "LD_PRELOAD": sys.argv[1], "TRACER_OUT": out}
subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
by_name, by_dlsym = map(int, open(out).read().split())
assert (by_name, by_dlsym) == (0, 10), (by_name, by_dlsym)
