"""The line profiler, with the interface and the columns of pytorch_memlab."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, TextIO, Tuple, TypeVar

from gpu_memtrace import _line_profiler
from gpu_memtrace._line_profiler import LineTables, clear_global_line_profiler, global_profiler, set_target_gpu

__all__ = [
    "DEFAULT_COLUMNS",
    "LineProfiler",
    "clear_global_line_profiler",
    "global_line_profiler",
    "profile",
    "profile_every",
    "set_target_gpu",
]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_COLUMNS: Tuple[str, ...] = ("active_bytes.all.peak", "reserved_bytes.all.peak")

global_line_profiler = global_profiler


class LineProfiler(_line_profiler.LineProfiler):
    """Profiles functions line by line, on GPU 0 unless ``target_gpu`` names another one."""

    def __init__(self, *functions: Callable[..., Any], target_gpu: Any = 0) -> None:
        super().__init__(*functions, target_gpu=target_gpu)

    def display(
        self, func: Optional[Callable[..., Any]] = None, columns: Sequence[str] = DEFAULT_COLUMNS
    ) -> LineTables:
        """The tables of one function or of all."""
        return super().display(func, columns)

    def print_stats(
        self,
        func: Optional[Callable[..., Any]] = None,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        stream: Optional[TextIO] = None,
    ) -> None:
        """Prints the tables, on stdout by default."""
        super().print_stats(func, columns, stream)


def profile(func: F, columns: Sequence[str] = DEFAULT_COLUMNS) -> F:
    """Prints the lines of a function when the program ends."""
    return _line_profiler.profile(func, columns)


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: Sequence[str] = DEFAULT_COLUMNS
) -> Callable[[F], F]:
    """Prints the lines of a function each time that it has run ``output_interval`` times."""
    return _line_profiler.profile_every(output_interval, enable, columns)
