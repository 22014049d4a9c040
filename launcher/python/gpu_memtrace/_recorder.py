"""Records this process from inside, by ``memtrace attach``, for programs that cannot be started by memtrace."""

from __future__ import annotations

import ctypes
import linecache
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Callable, List, Optional, Sequence, Union

from gpu_memtrace import _library, _recording

#: How long `memtrace attach` may take. Its own limits are lower.
_START_TIMEOUT = 60.0
#: `PR_SET_PTRACER` of linux/prctl.h.
_SET_PTRACER = 0x59616D61
_READY = "recording to "
_READY_END = "; Ctrl-C detaches"

_lock = threading.Lock()
#: The recorder that records this process.
_active: Optional[Recorder] = None


def _reset_after_fork() -> None:
    global _lock, _active
    _lock, _active = threading.Lock(), None


os.register_at_fork(after_in_child=_reset_after_fork)


class Recorder:
    """Records a part of this process into a run folder.

    ``with gpu_memtrace.Recorder("run"): train()`` attaches memtrace to this process and detaches it at the end of the
    block. ``start()`` and ``stop()`` do the same in two cells of a notebook. ``folder`` must be new or empty; by
    default, it is ``memtrace-PROGRAM-TIME`` in the current folder. ``options`` are those of ``memtrace attach``. A
    recorder records once. At its end it prints the summary to ``sys.stderr``, unless ``quiet`` is set.
    """

    def __init__(
        self,
        folder: Union[str, "os.PathLike[str]", None] = None,
        *,
        options: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        self._options = list(options)
        if folder is not None:
            self._options += ["--output", os.fspath(folder)]
        self._quiet = quiet
        self._launcher: Optional[subprocess.Popen[bytes]] = None
        self._output: Optional[BinaryIO] = None
        self._folder: Optional[Path] = None
        self._pid = 0
        self._end: signal.Signals = signal.SIGTERM
        self._is_stopped = False
        self._end_of_cells: Optional[Callable[[], None]] = None

    @property
    def folder(self) -> Path:
        """The run folder. Raises :class:`RecordingError` before the start."""
        if self._folder is None:
            raise _library.RecordingError("the recorder has not started")
        return self._folder

    @property
    def is_recording(self) -> bool:
        """Whether it records this process now."""
        return _active is self

    def start(self) -> "Recorder":
        """Begins the recording. Raises :class:`RecordingError` if this process cannot be recorded."""
        global _active
        if _library.library is not None:
            raise _library.RecordingError("memtrace records this process already; gpu_memtrace.annotate names a part")
        if "torch" not in sys.modules:
            raise _library.RecordingError("PyTorch is not imported; import torch before the recording begins")
        with _lock:
            if _active is not None:
                raise _library.RecordingError(
                    f"a Recorder records this process already, into {_active._folder or 'a folder'}; stop it first"
                )
            if self._launcher is not None:
                raise _library.RecordingError("a Recorder records once; make a new one")
            _active = self
        try:
            self._attach()
        except BaseException:
            self._release()
            raise
        return self

    def _attach(self) -> None:
        command = [_recording.binary(), "attach", *self._options, str(os.getpid())]
        self._end_of_cells = _save_cells()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `_release` closes it
        self._pid = os.getpid()
        self._end = _end_signal()
        permission = _Permission()
        try:
            # Ctrl+C is for the program: in a session of its own, the launcher does not get it.
            self._launcher = subprocess.Popen(
                command,
                env=_recording.outside_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            until = time.monotonic() + _START_TIMEOUT
            while self._folder is None:
                has_ended = self._launcher.poll() is not None
                self._folder = self._started_folder()
                if self._folder is not None:
                    break
                if has_ended:
                    raise _library.RecordingError(_error(self._text()))
                if time.monotonic() > until:
                    raise _library.RecordingError(f"memtrace has not attached within {_START_TIMEOUT:.0f} s")
                _run_python()
        except BaseException:
            if self._launcher is not None and self._launcher.poll() is None:
                self._launcher.send_signal(self._end)
                self._launcher.wait()
            raise
        finally:
            permission.withdraw()

    def _started_folder(self) -> Optional[Path]:
        for line in self._text().splitlines():
            _, found, rest = line.partition(_READY)
            if found and rest.endswith(_READY_END):
                return Path(rest[: -len(_READY_END)]).absolute()
        return None

    def _text(self) -> str:
        """The output of the launcher."""
        output = self._output
        if output is None:
            return ""
        # The launcher writes at the same offset, so it must stay as it is.
        size = os.fstat(output.fileno()).st_size
        return os.pread(output.fileno(), size, 0).decode(errors="replace")

    def stop(self) -> None:
        """Ends the recording, and waits until its reports are written. In a forked child, it does nothing.

        Raises :class:`RecordingError` if the recording has failed.
        """
        launcher = self._launcher
        if launcher is None or self._is_stopped or self._pid != os.getpid():
            return
        self._is_stopped = True
        try:
            if launcher.poll() is None:
                launcher.send_signal(self._end)
            status = launcher.wait()
            text = self._text()
        finally:
            self._release()
        if status != 0:
            raise _library.RecordingError(_error(text) if status > 0 else f"memtrace was ended by signal {-status}")
        if not self._quiet:
            begin = text.find(_READY_END)
            sys.stderr.write(text[begin + len(_READY_END) :].lstrip("\n") if begin >= 0 else text)

    def _release(self) -> None:
        global _active
        with _lock:
            if _active is self:
                _active = None
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._end_of_cells is not None:
            self._end_of_cells()
            self._end_of_cells = None

    def __enter__(self) -> "Recorder":
        return self.start()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.stop()
        except _library.RecordingError as failure:
            if error is None:
                raise
            # The error of the block is of more interest.
            warnings.warn(f"the recording has failed: {failure}", RuntimeWarning, stacklevel=2)

    def report(self) -> Any:
        """The report of the recording: an interactive page in a notebook, text elsewhere (``str()``)."""
        from gpu_memtrace._notebook import report_of_run

        if not self._is_stopped:
            raise _library.RecordingError("the recorder has not stopped")
        return report_of_run(self.folder)


class _Permission:
    """Lets this process's children trace it, where the kernel permits that only to its parents (Yama)."""

    def __init__(self) -> None:
        self._is_given = _ptrace_scope() == "1" and _set_ptracer(os.getpid())

    def withdraw(self) -> None:
        if self._is_given:
            _set_ptracer(0)


def _ptrace_scope() -> str:
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return ""


def _set_ptracer(pid: int) -> bool:
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *(4 * [ctypes.c_ulong])]
    return int(prctl(_SET_PTRACER, pid, 0, 0, 0)) == 0


def _end_signal() -> signal.Signals:
    """A signal that ends the launcher: it inherits those that this process ignores, as a job of a script does."""
    ignored = 0
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                ignored = int(line.split()[1], 16)
    except OSError:
        pass
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if not ignored >> (number - 1) & 1:
            return number
    raise _library.RecordingError("this process ignores SIGTERM, SIGINT and SIGHUP; one of them must end the recording")


def _run_python() -> None:
    """Runs Python for about a millisecond: memtrace attaches to a thread that does."""
    until = time.monotonic() + 0.001
    while time.monotonic() < until:
        for _ in range(200):
            pass
    # Other threads get their turn.
    time.sleep(0.0001)


def _error(text: str) -> str:
    """The error and the help that memtrace has printed, as one text."""
    found: List[str] = []
    for line in text.splitlines():
        if line.startswith("error: "):
            found.append(line[len("error: ") :])
        elif line.startswith("help: "):
            found.append("\n" + line.replace("choose another folder with -o", "name another folder"))
    return "".join(found[:2]) or text.strip() or "memtrace has ended"


def _save_cells() -> Optional[Callable[[], None]]:
    """In a notebook, writes the cells into the files that their frames name, so that reports quote them.

    Returns what ends that.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    from gpu_memtrace import _notebook

    # The cells that have run, and this one.
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4:
            _notebook.save_source(name, "".join(entry[2]))
    return _notebook.save_cells(shell)
