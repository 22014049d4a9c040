"""A replacement for pytorch_memlab whose figures come from memtrace's recording.

Change ``from pytorch_memlab import ...`` to ``from gpu_memtrace.memlab import ...``. :func:`install` makes unmodified
programs use it.
"""

from __future__ import annotations

import sys

from gpu_memtrace.memlab import courtesy, line_profiler, mem_reporter, utils
from gpu_memtrace.memlab.courtesy import Courtesy
from gpu_memtrace.memlab.line_profiler import (
    LineProfiler,
    clear_global_line_profiler,
    profile,
    profile_every,
    set_target_gpu,
)
from gpu_memtrace.memlab.mem_reporter import MemReporter

__all__ = [
    "Courtesy",
    "LineProfiler",
    "MemReporter",
    "clear_global_line_profiler",
    "install",
    "profile",
    "profile_every",
    "set_target_gpu",
]


def install() -> None:
    """Lets ``import pytorch_memlab`` import this module in this process, from now on."""
    sys.modules["pytorch_memlab"] = sys.modules[__name__]
    for module in (courtesy, line_profiler, mem_reporter, utils):
        name = module.__name__.rpartition(".")[2]
        sys.modules[f"pytorch_memlab.{name}"] = module
