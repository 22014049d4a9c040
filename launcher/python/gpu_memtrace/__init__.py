"""memtrace: a GPU-memory flight recorder. `memtrace -- python train.py` records an unmodified program.

A program that memtrace records can import this package to name its parts, to pause the recording, and to read its own
figures while it runs. Without memtrace, ``annotate``, ``pause`` and ``resume`` do nothing.

The modules of the package are imported when one of their names is first used, so an import costs a program nothing.
"""

from __future__ import annotations

from gpu_memtrace import _library  # noqa: F401 - binds memtrace's library when the program starts

# Type checkers take it for typing.TYPE_CHECKING, without the import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

    from gpu_memtrace._annotate import annotate
    from gpu_memtrace._figures import DeviceMemory, LineFigures, Memory, current, lines, peak, snapshot
    from gpu_memtrace._library import NotRecordedError, RecordingError
    from gpu_memtrace._limit import limit
    from gpu_memtrace._line_profiler import (
        LineProfiler,
        clear_global_line_profiler,
        profile,
        profile_every,
        set_target_gpu,
    )
    from gpu_memtrace._pause import is_recording, pause, paused, resume
    from gpu_memtrace._recorder import Recorder
    from gpu_memtrace._recording import run_folder
    from gpu_memtrace._tensors import DeviceTensors, TensorReport, TensorRow, tensors

__version__ = "0.1.0"

__all__ = [
    "DeviceMemory",
    "DeviceTensors",
    "LineFigures",
    "LineProfiler",
    "Memory",
    "NotRecordedError",
    "Recorder",
    "RecordingError",
    "TensorReport",
    "TensorRow",
    "annotate",
    "clear_global_line_profiler",
    "current",
    "is_recording",
    "limit",
    "lines",
    "load_ipython_extension",
    "pause",
    "paused",
    "peak",
    "profile",
    "profile_every",
    "resume",
    "run_folder",
    "set_target_gpu",
    "snapshot",
    "tensors",
]

#: The modules of the names.
_NAMES = {
    "_annotate": ("annotate",),
    "_figures": ("DeviceMemory", "LineFigures", "Memory", "current", "lines", "peak", "snapshot"),
    "_library": ("NotRecordedError", "RecordingError"),
    "_limit": ("limit",),
    "_line_profiler": ("LineProfiler", "clear_global_line_profiler", "profile", "profile_every", "set_target_gpu"),
    "_pause": ("is_recording", "pause", "paused", "resume"),
    "_recorder": ("Recorder",),
    "_recording": ("run_folder",),
    "_tensors": ("DeviceTensors", "TensorReport", "TensorRow", "tensors"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Gives IPython the magics ``%memtrace`` and ``%%memtrace``: ``%load_ext gpu_memtrace`` calls this."""
    from gpu_memtrace import _notebook

    _notebook.load_ipython_extension(shell)


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
