"""A line profiler: what each line of a function did to GPU memory.

A decorator only marks a function. Its figures come from the recording of memtrace, so the function runs at full speed,
and they are exact on all threads. A line without an allocation or a free has no figures.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import sys
import threading
import types
from dataclasses import dataclass
from html import escape
from typing import (
    Any,
    AsyncGenerator,
    Callable,
    Dict,
    Generator,
    List,
    Mapping,
    Optional,
    Sequence,
    TextIO,
    Tuple,
    TypeVar,
    Union,
    cast,
    overload,
)

from gpu_memtrace import _figures, _library
from gpu_memtrace._annotate import annotate
from gpu_memtrace._figures import LineFigures, code_of
from gpu_memtrace._sizes import size_text

F = TypeVar("F", bound=Callable[..., Any])

#: The peaks while a line was current, and how much it left allocated. ``diff`` is ``allocated`` less ``freed``; the
#: other names are those of ``torch.cuda.memory_stats``.
DEFAULT_COLUMNS: Tuple[str, ...] = (
    "active_bytes.all.peak",
    "reserved_bytes.all.peak",
    "active_bytes.all.diff",
    "reserved_bytes.all.diff",
)

_FIGURES = frozenset(
    ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
    + ("allocation", "active", "segment", "inactive_split")
)
_instances = itertools.count(1)


@dataclass(frozen=True)
class FunctionTable:
    """The lines of one function on one device."""

    function: str
    device: int
    first_line: int
    source: Sequence[str]
    figures: Mapping[int, LineFigures]
    columns: Tuple[str, ...]

    def rows(self) -> List[Tuple[List[str], int, str]]:
        """The cells of the columns, the line's number, and its text."""
        numbered = dict(enumerate(self.source, self.first_line))
        for line, figures in self.figures.items():
            numbered.setdefault(line, figures.text)
        return [
            ([_cell(self.figures.get(line), column) for column in self.columns], line, text.rstrip())
            for line, text in sorted(numbered.items())
        ]


class LineTables:
    """The tables of several functions. ``str()`` gives text, and notebooks show HTML."""

    def __init__(self, tables: List[FunctionTable], remarks: List[str]) -> None:
        self.tables = tables
        self.remarks = remarks

    def __str__(self) -> str:
        texts = [_text(table) for table in self.tables]
        return "\n".join(texts + [remark + "\n" for remark in self.remarks])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts = [_html(table) for table in self.tables]
        return "\n".join(parts + [f"<p>{escape(remark)}</p>" for remark in self.remarks])


def _title(table: FunctionTable) -> str:
    return f"{table.function} on {'the CPU' if table.device < 0 else f'GPU {table.device}'}"


def _text(table: FunctionTable) -> str:
    heads = [column.split(".") for column in table.columns]
    depth = max([len(head) for head in heads], default=1)
    rows = table.rows()
    widths = [
        max([len(part) for part in head] + [len(cells[index]) for cells, _, _ in rows])
        for index, head in enumerate(heads)
    ]
    number_width = max([4] + [len(str(line)) for _, line, _ in rows])
    text = [f"## {_title(table)}", ""]
    for level in range(depth):
        cells = [(head[level] if level < len(head) else "").rjust(width) for head, width in zip(heads, widths)]
        last = level == depth - 1
        text.append("  ".join(cells + ["line".rjust(number_width) if last else "", "code" if last else ""]).rstrip())
    for row, line, code in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        text.append("  ".join(cells + [str(line).rjust(number_width), code]).rstrip())
    return "\n".join(text) + "\n"


def _html(table: FunctionTable) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in (*table.columns, "line", "code"))
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + f"<td>{line}</td><td style='text-align: left'><pre>{escape(code)}</pre></td></tr>"
        for cells, line, code in table.rows()
    )
    return f"<h3><code>{escape(_title(table))}</code></h3><table><tr>{heads}</tr>{body}</table>"


def _cell(figures: Optional[LineFigures], column: str) -> str:
    if figures is None:
        return ""
    value = _value(figures.statistics, column)
    if value is None:
        return ""
    return size_text(value) if "bytes" in column.split(".")[0] else str(value)


def _value(statistics: Mapping[str, int], column: str) -> Optional[int]:
    figure, dot, kind = column.rpartition(".")
    if kind == "diff" and dot:
        allocated, freed = (statistics.get(f"{figure}.{name}") for name in ("allocated", "freed"))
        return None if allocated is None or freed is None else allocated - freed
    return statistics.get(column)


def check_columns(columns: Sequence[str]) -> Tuple[str, ...]:
    """The columns. Raises :class:`ValueError` for a name that ``torch.cuda.memory_stats`` does not have."""
    for column in columns:
        parts = column.split(".")
        known = (
            len(parts) == 3
            and parts[0] in _FIGURES
            and parts[1] in ("all", "large_pool", "small_pool")
            and parts[2] in ("current", "peak", "allocated", "freed", "diff")
        )
        if not known:
            raise ValueError(
                f"{column!r} is no column: use the names of torch.cuda.memory_stats, such as active_bytes.all.peak, "
                "or .diff for allocated less freed"
            )
    return tuple(columns)


def device_number(device: Any) -> int:
    """The number of a device: an ``int``, or a ``torch.device``."""
    if isinstance(device, int):
        return device
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind == "cpu":
        return -1
    if kind == "cuda" and index is None:
        torch = sys.modules.get("torch")
        return int(torch.cuda.current_device()) if torch is not None else 0
    if isinstance(index, int):
        return index
    raise TypeError(f"{device!r} is no device: pass a number or a torch.device")


class LineProfiler:
    """Profiles functions line by line: ``with LineProfiler(f) as profiler: f()``, then ``profiler.print_stats()``.

    Counts what happens while it is enabled, on all threads. ``target_gpu`` is a GPU's number; by default, each device
    on which a function did anything gets a table.
    """

    def __init__(self, *functions: Callable[..., Any], target_gpu: Union[int, Any, None] = None) -> None:
        self._codes: Dict[types.CodeType, str] = {}
        self._targets: List[int] = []
        self._range_name: Optional[str] = None
        self._range: Optional[annotate] = None
        if target_gpu is not None:
            self.target_gpu = target_gpu
        for function in functions:
            self.add_function(function)

    @property
    def target_gpu(self) -> Optional[int]:
        """The device that is shown. Each device that was set is shown, so that a function can change it."""
        return self._targets[-1] if self._targets else None

    @target_gpu.setter
    def target_gpu(self, device: Any) -> None:
        number = device_number(device)
        if number in self._targets:
            self._targets.remove(number)
        self._targets.append(number)

    @property
    def enabled(self) -> bool:
        """Whether the profiler counts what happens now."""
        return self._range is not None

    @property
    def codes(self) -> Dict[types.CodeType, str]:
        """The functions that it profiles, with their names."""
        return self._codes

    @property
    def range_name(self) -> Optional[str]:
        """The name of the ranges in which it counts. None before it was enabled."""
        return self._range_name

    def name_range(self, name: str) -> None:
        """Names the ranges in which it counts. No other range of the program may have this name."""
        self._range_name = name

    def add_function(self, function: Callable[..., Any]) -> None:
        """Adds a function, a method, or the function inside a decorated one."""
        code = code_of(function)
        self._codes[code] = getattr(function, "__qualname__", None) or code.co_name

    def enable(self) -> None:
        """Counts from now on."""
        if self._range is None:
            if self._range_name is None:
                self._range_name = f"gpu_memtrace.LineProfiler {next(_instances)}"
            self._range = annotate(self._range_name)
            self._range.__enter__()

    def disable(self) -> None:
        """Counts no more until :meth:`enable`."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def clear(self) -> None:
        """Forgets all functions and figures."""
        was_enabled = self.enabled
        self.disable()
        self._codes.clear()
        self._range_name = None
        if was_enabled:
            self.enable()

    def __enter__(self) -> "LineProfiler":
        self.enable()
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def display(
        self, func: Optional[Callable[..., Any]] = None, columns: Sequence[str] = DEFAULT_COLUMNS
    ) -> LineTables:
        """The tables of one function or of all. Columns are keys of ``torch.cuda.memory_stats``, or end in ``diff``."""
        columns = check_columns(columns)
        codes = self._codes
        if func is not None:
            code = code_of(func)
            codes = {code: self._codes.get(code) or code.co_name}
        if _library.library is None:
            remark = f"No line figures: memtrace does not record this process; {_library.LAUNCH_HELP}"
            return LineTables([], [remark] if codes else [])
        tables: List[FunctionTable] = []
        remarks: List[str] = []
        if self._range_name is not None or self is global_profiler:
            for code, name in codes.items():
                found = self._tables(code, name, columns)
                tables += found
                if not found:
                    remarks.append(f"{name} has neither allocated nor freed GPU memory")
        return LineTables(tables, remarks)

    def _tables(self, code: types.CodeType, name: str, columns: Tuple[str, ...]) -> List[FunctionTable]:
        # A class body or a module whose file is gone has no source.
        try:
            source = inspect.getsourcelines(code)[0]
        except (OSError, TypeError):
            source = []
        source = [line.rstrip("\n") for line in source]
        tables = []
        for device, rows in _figures.lines_by_device(code, self._targets or None, self._range_name).items():
            if rows:
                figures = {row.line: row for row in rows}
                tables.append(FunctionTable(name, device, code.co_firstlineno, source, figures, columns))
        return tables

    def print_stats(
        self,
        func: Optional[Callable[..., Any]] = None,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        stream: Optional[TextIO] = None,
    ) -> None:
        """Prints :meth:`display`, on stdout by default."""
        (stream or sys.stdout).write(str(self.display(func, columns)))


#: The profiler of :func:`profile` and :func:`profile_every`. It counts the whole recording until it is cleared.
global_profiler = LineProfiler()


def set_target_gpu(device: Any) -> None:
    """Chooses the device whose figures :func:`profile` and :func:`profile_every` print: a number or a ``torch.device``.

    Every device that was chosen during the run gets a table. Without a call, each device with figures gets one.
    """
    global_profiler.target_gpu = device


def clear_global_line_profiler() -> None:
    """Forgets the functions and figures of :func:`profile` and :func:`profile_every`."""
    global_profiler.clear()
    # The figures of functions that are marked from now on begin here.
    global_profiler.enable()


@overload
def profile(func: F, columns: Sequence[str] = ...) -> F: ...


@overload
def profile(func: None = ..., columns: Sequence[str] = ...) -> Callable[[F], F]: ...


def profile(func: Optional[F] = None, columns: Sequence[str] = DEFAULT_COLUMNS) -> Union[F, Callable[[F], F]]:
    """Prints the lines of a function when the program ends, also after an exception or Ctrl+C.

    ``@profile`` or ``@profile(columns=[...])``, above a function, a method, a generator or an ``async`` function. The
    function itself stays as it is.
    """
    checked = check_columns(columns)

    def mark(function: F) -> F:
        global_profiler.add_function(function)
        atexit.register(_print, function, checked)
        return function

    return mark if func is None else mark(func)


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: Sequence[str] = DEFAULT_COLUMNS
) -> Callable[[F], F]:
    """Prints the lines of a function each time that it has run ``output_interval`` times."""
    checked = check_columns(columns)
    if output_interval < 1:
        raise ValueError("output_interval must be at least 1")

    def decorate(function: F) -> F:
        if not enable:
            return function
        global_profiler.add_function(function)
        lock = threading.Lock()
        calls = itertools.count(1)

        def ended() -> None:
            with lock:
                is_due = next(calls) % output_interval == 0
            if is_due:
                _print(function, checked)

        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                inner = function(*args, **kwargs)
                step = inner.__anext__()
                while True:
                    try:
                        item = await step
                    except StopAsyncIteration:
                        break
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await inner.aclose()
                        raise
                    except BaseException as error:
                        step = inner.athrow(error)
                    else:
                        step = inner.asend(sent)
                ended()

            return cast(F, async_generator)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                result = await function(*args, **kwargs)
                ended()
                return result

            return cast(F, coroutine)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                result = yield from function(*args, **kwargs)
                ended()
                return result

            return cast(F, generator)

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            ended()
            return result

        return cast(F, plain)

    return decorate


def _print(function: Callable[..., Any], columns: Tuple[str, ...]) -> None:
    # A profiler must not end the program that it profiles.
    try:
        global_profiler.print_stats(function, columns)
    except (_library.RecordingError, OSError, ValueError) as error:
        print(f"gpu_memtrace: cannot print the lines of {function!r}: {error}", file=sys.stderr)
