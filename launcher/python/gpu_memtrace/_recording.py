"""The recording of this process: memtrace's functions in it, and the part of its trace that is on disk.

The functions exist only in a process that memtrace has started. Everywhere else, this module does nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Optional

from gpu_memtrace._binary import BinaryNotFoundError, find_binary

LAUNCH_HELP = "start the program with memtrace: memtrace -- python train.py"
#: How long a call waits for the launcher to write the trace, in milliseconds.
FLUSH_TIMEOUT_MS = 30_000

_FLUSHED, _NO_EVENTS, _TIMED_OUT, _ENDED = range(4)
#: Variables of the session, besides those whose names begin with MEMTRACE_.
_SESSION_VARIABLES = ("LD_PRELOAD", "NVTX_INJECTION64_PATH")


class NotRecordedError(RuntimeError):
    """A function needs a recording, and memtrace does not record this process."""


class RecordingError(RuntimeError):
    """The recording of this process cannot be read."""


class Library:
    """The functions that the preloaded library exports."""

    def __init__(self, functions: ctypes.CDLL) -> None:
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
        self.run_folder = function("memtrace_run_folder", ctypes.c_size_t, *string)
        self.trace_file = function("memtrace_trace_file", ctypes.c_size_t, *string)


def _load() -> Optional[Library]:
    # A process without the variable has no session, even if another library has functions of these names.
    if "MEMTRACE_SESSION" not in os.environ:
        return None
    try:
        return Library(ctypes.CDLL(None))
    except (AttributeError, OSError):
        return None


#: None where memtrace does not record.
library: Optional[Library] = _load()


def required() -> Library:
    """The functions of the recording. Raises :class:`NotRecordedError` where there is none."""
    if library is None:
        raise NotRecordedError(f"memtrace does not record this process; {LAUNCH_HELP}")
    return library


def _path(function: Callable[..., Any]) -> Optional[Path]:
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = int(function(buffer, size))
        if length == 0:
            return None
        if length < size:
            return Path(os.fsdecode(buffer.value))
        size = length + 1


def run_folder() -> Path:
    """The folder of the run that records this process."""
    folder = _path(required().run_folder)
    if folder is None:
        raise RecordingError("memtrace has not named the run folder")
    return folder


def flushed_trace() -> Optional[Path]:
    """This process's trace file, after all events up to now are in it. None before the first event."""
    functions = required()
    status = functions.flush(FLUSH_TIMEOUT_MS)
    if status == _NO_EVENTS:
        return None
    if status == _TIMED_OUT:
        raise RecordingError(f"memtrace has not written the trace within {FLUSH_TIMEOUT_MS // 1000} s")
    # After the end of the recording, the part on disk is all that there is.
    trace = _path(functions.trace_file)
    if trace is None:
        raise RecordingError("memtrace has not named the trace file")
    return trace


def binary() -> str:
    """The path of the program ``memtrace``."""
    try:
        return find_binary()
    except BinaryNotFoundError as error:
        # A checkout of the repository has no program beside the package.
        found = shutil.which("memtrace")
        if found is None:
            raise RecordingError(f"{error}; {error.help}, or set MEMTRACE_BIN to its path") from None
        return found


def run_binary(*arguments: object) -> bytes:
    """Runs memtrace with these arguments, without recording it. Returns what it prints."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMTRACE_") and name not in _SESSION_VARIABLES
    }
    preload = _without_session(os.environ.get("LD_PRELOAD", ""))
    if preload:
        environment["LD_PRELOAD"] = preload
    command = [binary(), *(os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise RecordingError(f"{' '.join(command[1:3])}: {text}")
    return done.stdout


def _without_session(preload: str) -> str:
    """The entries of LD_PRELOAD that are not memtrace's."""
    entries = [entry for entry in preload.replace(" ", ":").split(":") if entry]
    return ":".join(entry for entry in entries if "libmemtrace" not in os.path.basename(entry))


def run_binary_json(*arguments: object) -> Any:
    """:func:`run_binary` for a command that prints JSON."""
    return json.loads(run_binary(*arguments))
