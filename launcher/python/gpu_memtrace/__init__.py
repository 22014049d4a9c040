"""memtrace: a GPU-memory flight recorder. `memtrace -- python train.py` records an unmodified program.

A program that memtrace records can import this package to name its parts, to pause the recording, and to read its own
figures while it runs. Without memtrace, ``annotate``, ``pause`` and ``resume`` do nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

from gpu_memtrace import _recording
from gpu_memtrace._annotate import annotate
from gpu_memtrace._figures import DeviceMemory, LineFigures, Memory, current, lines, peak, snapshot
from gpu_memtrace._line_profiler import (
    LineProfiler,
    clear_global_line_profiler,
    profile,
    profile_every,
    set_target_gpu,
)
from gpu_memtrace._recording import NotRecordedError, RecordingError, run_folder
from gpu_memtrace._tensors import DeviceTensors, TensorReport, TensorRow, tensors

__version__ = "0.1.0"

__all__ = [
    "DeviceMemory",
    "DeviceTensors",
    "LineFigures",
    "LineProfiler",
    "Memory",
    "NotRecordedError",
    "RecordingError",
    "TensorReport",
    "TensorRow",
    "annotate",
    "clear_global_line_profiler",
    "current",
    "is_recording",
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


def is_recording() -> bool:
    """Whether memtrace records this process now. False also while the recording is paused."""
    library = _recording.library
    return library is not None and bool(library.is_recording())


def load_ipython_extension(shell: Any) -> None:
    """Gives IPython the magics ``%memtrace`` and ``%%memtrace``: ``%load_ext gpu_memtrace`` calls this."""
    from gpu_memtrace import _notebook

    _notebook.load_ipython_extension(shell)


def pause() -> None:
    """Pauses the recording of this process. The report counts what happens until :func:`resume` as not recorded."""
    if _recording.library is not None:
        _recording.library.pause()


def resume() -> None:
    """Resumes the recording after :func:`pause`."""
    if _recording.library is not None:
        _recording.library.resume()


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the recording in a ``with`` block. A block inside a paused part leaves the recording paused."""
    if not is_recording():
        yield
        return
    pause()
    try:
        yield
    finally:
        resume()
