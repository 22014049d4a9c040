"""Whether memtrace records, and pauses of the recording."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from gpu_memtrace import _library


def is_recording() -> bool:
    """Whether memtrace records this process now. False also while the recording is paused."""
    library = _library.library
    return library is not None and bool(library.is_recording())


def pause() -> None:
    """Pauses the recording of this process. The report counts what happens until :func:`resume` as not recorded."""
    if _library.library is not None:
        _library.library.pause()


def resume() -> None:
    """Resumes the recording after :func:`pause`."""
    if _library.library is not None:
        _library.library.resume()


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
