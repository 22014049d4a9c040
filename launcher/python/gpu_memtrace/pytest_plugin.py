"""A plugin of pytest: limits for the GPU memory of a test.

``@pytest.mark.memtrace(max_peak="2GiB")`` limits the peak while the test function runs, and ``limit="24GiB"`` lets it
see GPUs with so much memory. The limits hold in a process that memtrace records: ``pytest --memtrace``, or
``memtrace -- pytest``. ``pytest --memtrace-dry-run a100-40gb`` needs no GPU. Elsewhere the tests run without limits,
and the summary of pytest says so.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ContextManager, Dict, Generator, List, Mapping, Optional, Set

import pytest

from gpu_memtrace import _library, _recording
from gpu_memtrace._annotate import annotate
from gpu_memtrace._limit import limit, limit_size
from gpu_memtrace._sizes import parse_size, size_text

if TYPE_CHECKING:
    from gpu_memtrace._figures import RangeMemory

#: Longer names of ranges are cut when they are recorded. In bytes.
_LONGEST_NAME = 1000
_LIMITS = ("max_peak", "max_growth", "max_kept")
_HELP = (
    "memtrace(max_peak=None, max_growth=None, max_kept=None, device=None, limit=None): limits the GPU memory of the "
    "test, such as max_peak='2GiB'. max_peak: allocated bytes, with what was allocated before; max_growth: the peak "
    "less what was allocated before; max_kept: allocated bytes after the test less those before; limit: the memory "
    "that the test sees on each GPU, so that what does not fit fails as on a smaller one."
)
#: The attribute of a test's report if its limits were not checked. pytest-xdist sends it from a worker to the main
#: process.
_UNCHECKED = "memtrace_limits_unchecked"


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("memtrace", "GPU memory (memtrace)")
    group.addoption("--memtrace", action="store_true", help="Record the tests with memtrace, and check their limits")
    group.addoption(
        "--memtrace-dry-run",
        metavar="GPU",
        help="Record the tests over this simulated GPU, such as a100-40gb: none is needed, and no kernel computes",
    )
    group.addoption("--memtrace-output", metavar="DIR", help="The run folder, which must be new or empty")


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", _HELP)
    config.pluginmanager.register(_Plugin(), "memtrace-limits")


# The first wrapper runs before pytest redirects stdout and stderr.
@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_load_initial_conftests(early_config: Any) -> Generator[None, Any, None]:
    _restart_recorded(early_config)
    yield


def _restart_recorded(early_config: Any) -> None:
    """With --memtrace or --memtrace-dry-run, replaces this process by one that memtrace records."""
    options = early_config.known_args_namespace
    if not _is_to_be_recorded(options) or _library.library is not None:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if "MEMTRACE_SESSION" in os.environ:
        raise pytest.UsageError("memtrace runs, but cannot record this Python: see `memtrace doctor`")
    arguments = list(early_config.invocation_params.args)
    if [str(argument) for argument in arguments] != sys.argv[1:]:
        raise pytest.UsageError(
            "memtrace cannot restart this program, because it called pytest.main(); "
            "start it with memtrace: memtrace -- python PROGRAM"
        )
    try:
        binary = _recording.binary()
    except _library.RecordingError as error:
        raise pytest.UsageError(f"--memtrace: {error}") from None
    gpu = options.memtrace_dry_run
    command = [binary, *(["run"] if gpu is None else ["dry-run", f"--gpu={gpu}"]), "--quiet"]
    if options.memtrace_output:
        command += ["--output", str(options.memtrace_output)]
    command += ["--", *_this_command()]
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores it, and the new program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(command[0], command)


def _is_to_be_recorded(options: Any) -> bool:
    """Whether the options ask for a recording. They do not where the plugin's options are missing (a plugin's test)."""
    return getattr(options, "memtrace", False) or getattr(options, "memtrace_dry_run", None) is not None


def _this_command() -> List[str]:
    """The command that started this process."""
    original: Optional[List[str]] = getattr(sys, "orig_argv", None)
    if original is not None:
        return [sys.executable, *original[1:]]
    # Python 3.9 does not keep the options of the interpreter.
    program = sys.argv[0]
    return [sys.executable, *(["-m", "pytest"] if program.endswith("__main__.py") else [program]), *sys.argv[1:]]


class _Limits:
    """The limits of one test."""

    def __init__(self, bytes_by_name: Dict[str, int], device: Optional[int], visible: Optional[int]) -> None:
        self.bytes_by_name = bytes_by_name
        self.device = device
        #: The memory that the test sees on each GPU.
        self.visible = visible

    @classmethod
    def of(cls, item: Any) -> Optional["_Limits"]:
        """The limits of a test. The nearest marker decides each: that of a function before that of its class."""
        limits: Dict[str, int] = {}
        device: Optional[int] = None
        visible: Optional[int] = None
        for marker in item.iter_markers("memtrace"):
            unknown = sorted(set(marker.kwargs) - {*_LIMITS, "device", "limit"})
            if marker.args or unknown:
                raise pytest.UsageError(f"{item.nodeid}: unknown argument of the marker memtrace; {_HELP}")
            try:
                found = {
                    name: parse_size(marker.kwargs[name]) for name in _LIMITS if marker.kwargs.get(name) is not None
                }
                if device is None and marker.kwargs.get("device") is not None:
                    device = _device_number(marker.kwargs["device"])
                if visible is None and marker.kwargs.get("limit") is not None:
                    visible = limit_size(marker.kwargs["limit"])
            except (TypeError, ValueError) as error:
                raise pytest.UsageError(f"{item.nodeid}: marker memtrace: {error}") from None
            limits = {**found, **limits}
        return cls(limits, device, visible) if limits or visible is not None else None

    def exceeded(self, devices: Mapping[int, RangeMemory]) -> List[str]:
        """The exceeded limits, a line each."""
        lines = []
        for number, memory in sorted(devices.items()):
            if number != self.device if self.device is not None else number < 0:
                continue
            peak = memory.peak.allocated_bytes
            figures = {
                "max_peak": ("peak", peak),
                "max_growth": ("growth", peak - memory.start_bytes),
                "max_kept": ("kept", memory.end_bytes - memory.start_bytes),
            }
            place = "the CPU" if number < 0 else f"GPU {number}"
            for name, maximum in self.bytes_by_name.items():
                what, amount = figures[name]
                if amount > maximum:
                    exact = f" ({amount:,} > {maximum:,} bytes)" if size_text(amount) == size_text(maximum) else ""
                    lines.append(
                        f"{what} {size_text(amount)} > {name} {size_text(maximum)}{exact} on {place}; "
                        f"{size_text(memory.start_bytes)} were allocated before the test"
                    )
        return lines


def _seen(limits: Optional[_Limits]) -> ContextManager[None]:
    """While it is entered, the test sees GPUs with the memory of its limit."""
    return nullcontext() if limits is None or limits.visible is None else limit(limits.visible)


def _device_number(device: Any) -> int:
    if isinstance(device, str):
        kind, _, index = device.partition(":")
        if kind == "cpu" and not index:
            return -1
        if kind == "cuda" and index.isdigit():
            return int(index)
        raise ValueError(f"{device!r} is no device: use a number, 'cuda:N' or 'cpu'")
    from gpu_memtrace._line_profiler import device_number

    return device_number(device)


class _Plugin:
    """Names each test in the recording, and checks its limits."""

    def __init__(self) -> None:
        self._names: Set[str] = set()
        self._unchecked: List[str] = []

    def _name(self, nodeid: str) -> str:
        """A name for the range of a test. A test that runs again gets another one."""
        stem = nodeid.encode("utf-8", "replace")[:_LONGEST_NAME].decode("utf-8", "ignore")
        name, again = stem, 2
        while name in self._names:
            name, again = f"{stem} #{again}", again + 1
        self._names.add(name)
        return name

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, Any, None]:
        limits = _Limits.of(item)
        if _library.library is None:
            if limits is not None:
                setattr(item, _UNCHECKED, True)
            yield
            return
        name = self._name(item.nodeid)
        with annotate(name), _seen(limits):
            outcome = yield
        if limits is None or not limits.bytes_by_name:
            return
        failure = _failure(limits, name)
        if failure is None:
            return
        if outcome.excinfo is not None:
            # The test has failed by itself, or was skipped.
            item.add_report_section("call", "memtrace", failure)
            return
        _force_exception(outcome, pytest.fail.Exception(failure, pytrace=False))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
        outcome = yield
        if call.when == "call" and getattr(item, _UNCHECKED, False):
            setattr(outcome.get_result(), _UNCHECKED, True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if getattr(report, _UNCHECKED, False):
            self._unchecked.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._unchecked:
            terminalreporter.section("memtrace")
            tests = "1 test" if len(self._unchecked) == 1 else f"{len(self._unchecked)} tests"
            terminalreporter.line(f"The limits of {tests} were not checked: run pytest --memtrace")
        elif _library.library is not None and _is_to_be_recorded(terminalreporter.config.option):
            terminalreporter.section("memtrace")
            folder = os.path.relpath(_recording.run_folder())
            terminalreporter.line(f"The recording is in {folder}: memtrace report {folder}, or memtrace open {folder}")


def _force_exception(outcome: Any, error: BaseException) -> None:
    if hasattr(outcome, "force_exception"):
        outcome.force_exception(error)
    else:
        # pluggy before 1.1 has only this way.
        outcome._excinfo = (type(error), error, None)


def _failure(limits: _Limits, name: str) -> Optional[str]:
    """Reads what happened in a test. Returns the message of a failure, or None."""
    from gpu_memtrace._figures import range_report, range_text

    try:
        report = range_report(name)
        if report.losses:
            lost = ", ".join(f"{count} {loss.replace('_', ' ')}" for loss, count in sorted(report.losses.items()))
            warnings.warn(f"memtrace: the recording is incomplete, so figures may be too low: {lost}", stacklevel=1)
        exceeded = limits.exceeded(report.devices)
        if not exceeded:
            return None
        return "\n".join(exceeded) + "\n\n" + range_text(name).rstrip()
    except _library.RecordingError as error:
        return f"memtrace cannot read the recording, so the limits were not checked: {error}"
