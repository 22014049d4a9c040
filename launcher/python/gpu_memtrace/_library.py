"""memtrace's functions in this process. They exist only in a process that memtrace has started.

Every import of the package imports this module, so it imports nothing where memtrace does not record.
"""

from __future__ import annotations

import os

# Type checkers take it for typing.TYPE_CHECKING, without the import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

LAUNCH_HELP = "start the program with memtrace: memtrace -- python train.py"


class NotRecordedError(RuntimeError):
    """A function needs a recording, and memtrace does not record this process."""


class RecordingError(RuntimeError):
    """The recording of this process cannot be read."""


class Library:
    """The functions that the preloaded library exports."""

    def __init__(self) -> None:
        import ctypes

        functions = ctypes.CDLL(None)

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = functions[name]
            found.restype = result
            found.argtypes = list(arguments)
            return found

        string = (ctypes.c_char_p, ctypes.c_size_t)
        self.pause = function("memtrace_pause", None)
        self.resume = function("memtrace_resume", None)
        self.is_recording = function("memtrace_is_recording", ctypes.c_int)
        self.annotation_start = function("memtrace_annotation_start", ctypes.c_uint64, ctypes.c_char_p)
        self.annotation_end = function("memtrace_annotation_end", None, ctypes.c_uint64)
        self.flush = function("memtrace_flush", ctypes.c_int, ctypes.c_uint32)
        self.set_limit = function("memtrace_set_limit", ctypes.c_uint64, ctypes.c_uint64)
        self.run_folder = function("memtrace_run_folder", ctypes.c_size_t, *string)
        self.trace_file = function("memtrace_trace_file", ctypes.c_size_t, *string)


def _load() -> Optional[Library]:
    # A process without the variable has no session, even if another library has functions of these names.
    if "MEMTRACE_SESSION" not in os.environ:
        return None
    try:
        return Library()
    except (AttributeError, OSError):
        return None


#: None where memtrace does not record.
library: Optional[Library] = _load()


def required() -> Library:
    """The functions of the recording. Raises :class:`NotRecordedError` where there is none."""
    if library is None:
        raise NotRecordedError(f"memtrace does not record this process; {LAUNCH_HELP}")
    return library
