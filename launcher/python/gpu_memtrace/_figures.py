"""Figures of the recording so far: memory now and at the peak, by line, and as a snapshot."""

from __future__ import annotations

import inspect
import linecache
import os
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union, cast

from gpu_memtrace import _library, _recording
from gpu_memtrace._sizes import size_text


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device at one point in time, in bytes. Device -1 is the CPU."""

    device: int
    #: Bytes of blocks in use by the program, as ``torch.cuda.memory_allocated()`` counts them.
    allocated_bytes: int = 0
    #: Bytes that PyTorch's allocator has obtained from CUDA.
    reserved_bytes: int = 0
    #: Allocated bytes and blocks that streams still use.
    active_bytes: int = 0
    #: Bytes that the program has requested, before rounding.
    requested_bytes: int = 0
    #: Allocated bytes by category, such as ``parameter`` and ``activation``.
    by_category: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        name = "CPU tensors" if self.device < 0 else f"GPU {self.device}"
        reserved = "" if self.device < 0 else f", {size_text(self.reserved_bytes)} reserved"
        largest = sorted(self.by_category.items(), key=lambda one: -one[1])
        categories = [f"  {category}  {size_text(amount)}" for category, amount in largest]
        return "\n".join([f"{name}: {size_text(self.allocated_bytes)} allocated{reserved}", *categories])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


class Memory(Mapping[int, DeviceMemory]):
    """The memory of this process by device."""

    def __init__(self, devices: Dict[int, DeviceMemory]) -> None:
        self._devices = devices

    def __getitem__(self, device: int) -> DeviceMemory:
        return self._devices[device]

    def __iter__(self) -> Iterator[int]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        return f"Memory({list(self._devices.values())!r})"

    def __str__(self) -> str:
        return "\n".join(map(str, self._devices.values())) or "no memory was allocated"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes of all GPUs."""
        return sum(memory.allocated_bytes for device, memory in self._devices.items() if device >= 0)

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes of all GPUs."""
        return sum(memory.reserved_bytes for device, memory in self._devices.items() if device >= 0)

    @property
    def by_category(self) -> Dict[str, int]:
        """Allocated bytes of all GPUs by category."""
        sums: Dict[str, int] = {}
        for device, memory in self._devices.items():
            if device >= 0:
                for category, amount in memory.by_category.items():
                    sums[category] = sums.get(category, 0) + amount
        return sums


@dataclass(frozen=True)
class LineFigures:
    """The memory use of one source line on a device, in bytes."""

    line: int
    text: str
    device: int
    #: How often the line was seen to begin.
    times: int
    active_peak_bytes: int
    reserved_peak_bytes: int
    net_bytes: int
    allocated_bytes: int
    freed_bytes: int
    allocations: int
    frees: int
    #: The bytes that the backward pass of the line's calls allocated.
    backward_bytes: int
    #: By the names of ``torch.cuda.memory_stats``, such as ``active_bytes.all.peak``. Empty unless requested.
    statistics: Mapping[str, int] = field(default_factory=dict)


Function = Union[Callable[..., Any], types.CodeType]


def _device_memory(number: int, state: Optional[Dict[str, Any]]) -> DeviceMemory:
    """One of the memory states of summary.json."""
    if state is None:
        return DeviceMemory(number)
    totals = state["totals"]
    return DeviceMemory(
        device=number,
        allocated_bytes=totals["allocated_bytes"],
        reserved_bytes=totals["reserved_bytes"],
        active_bytes=totals["active_bytes"],
        requested_bytes=totals["requested_bytes"],
        by_category={row["category"]: row["bytes"] for row in state["by_category"] if row["bytes"]},
    )


def _memory(state_name: str) -> Memory:
    trace = _recording.flushed_trace()
    if trace is None:
        return Memory({})
    summary = _recording.run_binary_json("report", trace, "--json")
    devices = [device for process in summary["processes"] for device in process["devices"]]
    return Memory({d["device"]: _device_memory(d["device"], d.get(state_name)) for d in devices})


@dataclass(frozen=True)
class RangeMemory:
    """The memory of one device in the ranges of one name."""

    #: Allocated bytes at the start of the first range, and at the end of the last one or now.
    start_bytes: int
    end_bytes: int
    peak: DeviceMemory


@dataclass(frozen=True)
class RangeReport:
    """The memory use of the ranges of one name, in the recording so far."""

    devices: Mapping[int, RangeMemory]
    #: The losses of the recording, by the names of summary.json.
    losses: Mapping[str, int]
    #: Whether devices were recorded, but none in a range of this name.
    is_missing: bool = False

    def peaks(self) -> Memory:
        """The peak of each device."""
        return Memory({number: memory.peak for number, memory in self.devices.items()})


def range_report(name: str) -> RangeReport:
    """Reads the ranges of a name. A range that is still open ends now."""
    trace = _recording.flushed_trace()
    if trace is None:
        return RangeReport({}, {})
    summary = _recording.run_binary_json("report", trace, "--json", "--range", name)
    devices: Dict[int, RangeMemory] = {}
    for process in summary["processes"]:
        for device in process["devices"]:
            found = device.get("range")
            if found is not None:
                number = int(device["device"])
                peak = _device_memory(number, found["peak"])
                devices[number] = RangeMemory(found["start_bytes"], found["end_bytes"], peak)
    recorded = any(process["devices"] for process in summary["processes"])
    return RangeReport(devices, summary["losses"], recorded and not devices)


def range_text(name: str) -> str:
    """The peak in the ranges of a name as text: by category, by module and the largest allocations."""
    trace = _recording.flushed_trace()
    return "" if trace is None else _recording.run_binary("report", trace, "--range", name).decode(errors="replace")


def current() -> Memory:
    """The memory of this process now, by device and by category."""
    return _memory("end")


def peak(*, within: Optional[str] = None) -> Memory:
    """The memory of this process at the highest allocated bytes of each device so far.

    ``within`` looks only at the time in which a range of :func:`annotate` with this name was open. Blocks from before
    the range count. A device that was not recorded then is left out. Raises :class:`RecordingError` if a device was
    recorded, but none in a range of this name.
    """
    if within is None:
        return _memory("peak")
    report = range_report(within)
    if report.is_missing:
        raise _library.RecordingError(
            f"the recording has no range named {within} on a device; "
            "annotate, record_function and NVTX name ranges, and names are compared in full"
        )
    return report.peaks()


#: The formats of :func:`snapshot` by the ending of the file's name, as in ``memtrace snapshot -o``. None is the report.
_FORMATS: Dict[str, Optional[str]] = {
    ".pickle": "snapshot",
    ".pkl": "snapshot",
    ".html": "html",
    ".speedscope.json": "speedscope",
    ".json": "json",
    ".csv": "csv",
    ".svg": "timeline",
    ".pftrace": "perfetto",
    ".folded": "folded",
    ".txt": None,
}


def snapshot(path: Union[str, "os.PathLike[str]"]) -> Path:
    """Writes the recording so far into a file. Returns the path.

    The ending of its name selects the format: .pickle or .pkl (for https://pytorch.org/memory_viz), .html, .json (the
    summary), .speedscope.json, .csv, .svg, .pftrace, .folded, or .txt (the report). Raises :class:`ValueError` for
    another ending.
    """
    target = Path(path)
    ending = next((ending for ending in _FORMATS if target.name.lower().endswith(ending)), None)
    if ending is None:
        raise ValueError(
            f"cannot write {target}: the ending of its name selects no format; use one of {', '.join(_FORMATS)}"
        )
    trace = _recording.flushed_trace()
    if trace is None:
        raise _library.RecordingError("nothing has been allocated yet")
    format = _FORMATS[ending]
    if format is None:
        target.write_bytes(_recording.run_binary("report", trace, "--so-far"))
    else:
        _recording.run_binary("export", trace, "--so-far", "--to", format, "--output", target)
    return target


def code_of(function: Function) -> types.CodeType:
    """The code of a function, a method or a decorated function."""
    if isinstance(function, types.CodeType):
        return function
    unwrapped = inspect.unwrap(function)
    if isinstance(unwrapped, (classmethod, staticmethod)):
        unwrapped = unwrapped.__func__
    code = getattr(getattr(unwrapped, "__func__", unwrapped), "__code__", None)
    if not isinstance(code, types.CodeType):
        raise TypeError(f"{function!r} has no Python code: pass a function or a method")
    return code


def lines(
    function: Function, *, device: Optional[int] = None, within: Optional[str] = None, statistics: bool = False
) -> List[LineFigures]:
    """The GPU memory use of each line of a function so far, in the order of lines.

    Lines without an allocation or a free are left out. ``device`` is a GPU's number, -1 for the CPU; by default, the
    device with the highest peak. ``within`` counts only what happened in ranges of :func:`annotate` with this name.
    ``statistics`` adds the figures of ``torch.cuda.memory_stats``.
    """
    code = code_of(function)
    trace = _recording.flushed_trace()
    report = None if trace is None else _lines_report(trace, code, device, within, statistics)
    return [] if report is None else _figures_of(report, code)


def lines_by_device(
    function: Function, devices: Optional[Sequence[int]], within: Optional[str]
) -> Dict[int, List[LineFigures]]:
    """:func:`lines` with statistics for each of these devices. None: for each device of the recording."""
    code = code_of(function)
    trace = _recording.flushed_trace()
    if trace is None:
        return {}
    found: Dict[int, List[LineFigures]] = {}
    if devices is None:
        first = _lines_report(trace, code, None, within, True)
        if first is None:
            return {}
        found[first["device"]] = _figures_of(first, code)
        devices = [other["device"] for other in first["other_devices"]]
    for device in devices:
        report = _lines_report(trace, code, device, within, True)
        found[device] = [] if report is None else _figures_of(report, code)
    return dict(sorted(found.items()))


def _lines_report(
    trace: Path, code: types.CodeType, device: Optional[int], within: Optional[str], statistics: bool
) -> Optional[Dict[str, Any]]:
    """The JSON of `memtrace lines`. None if the code has neither allocated nor freed memory there."""
    options: List[object] = ["--function", code.co_name, "--file", code.co_filename, "--top", 1 << 20, "--json"]
    if device is not None:
        options += ["--device", device]
    if within is not None:
        options += ["--range", within]
    if statistics:
        options.append("--statistics")
    try:
        return cast("Dict[str, Any]", _recording.run_binary_json("lines", trace, *options))
    except _library.RecordingError as error:
        if "no memory was allocated or freed" in str(error):
            return None
        raise


def _figures_of(report: Dict[str, Any], code: types.CodeType) -> List[LineFigures]:
    found: List[LineFigures] = []
    for listed in report["functions"]:
        if listed["filename"] != code.co_filename or listed["first_line"] not in (0, code.co_firstlineno):
            continue
        for row in listed["lines"]:
            figures = row.get("figures")
            if figures is None:
                continue
            found.append(
                LineFigures(
                    line=row["line"],
                    text=linecache.getline(code.co_filename, row["line"]).rstrip("\n"),
                    device=report["device"],
                    times=figures["times"],
                    active_peak_bytes=figures["active_peak_bytes"],
                    reserved_peak_bytes=figures["reserved_peak_bytes"],
                    net_bytes=figures["net_bytes"],
                    allocated_bytes=figures["allocated_bytes"],
                    freed_bytes=figures["freed_bytes"],
                    allocations=figures["allocations"],
                    frees=figures["frees"],
                    backward_bytes=figures["backward_bytes"],
                    statistics=row.get("statistics") or {},
                )
            )
    return sorted(found, key=lambda row: row.line)
