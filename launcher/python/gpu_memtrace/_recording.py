"""The recording of this process: its run folder, and the part of its trace that is on disk."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from gpu_memtrace._binary import BinaryNotFoundError, find_binary
from gpu_memtrace._library import RecordingError, required

#: How long a call waits for the launcher to write the trace, in milliseconds.
FLUSH_TIMEOUT_MS = 30_000

_FLUSHED, _NO_EVENTS, _TIMED_OUT, _ENDED = range(4)
#: Variables of the session, besides those whose names begin with MEMTRACE_.
_SESSION_VARIABLES = ("LD_PRELOAD", "NVTX_INJECTION64_PATH")


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
    command = [binary(), *(os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments)]
    done = subprocess.run(
        command, env=outside_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise RecordingError(f"{' '.join(command[1:3])}: {text}")
    return done.stdout


def outside_environment() -> Dict[str, str]:
    """The environment without what makes memtrace record a process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMTRACE_") and name not in _SESSION_VARIABLES
    }
    preload = _without_session(os.environ.get("LD_PRELOAD", ""))
    if preload:
        environment["LD_PRELOAD"] = preload
    return environment


def _without_session(preload: str) -> str:
    """The entries of LD_PRELOAD that are not memtrace's."""
    entries = [entry for entry in preload.replace(" ", ":").split(":") if entry]
    return ":".join(entry for entry in entries if "libmemtrace" not in os.path.basename(entry))


def run_binary_json(*arguments: object) -> Any:
    """:func:`run_binary` for a command that prints JSON."""
    return json.loads(run_binary(*arguments))
