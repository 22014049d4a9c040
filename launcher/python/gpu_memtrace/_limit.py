"""Less GPU memory for a part of the program."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Union

from gpu_memtrace import _library
from gpu_memtrace._sizes import parse_size


def limit_size(size: Union[int, str]) -> int:
    """The bytes of a limit. Raises :class:`ValueError` for what is none."""
    number = parse_size(size)
    if number < 1:
        raise ValueError("a limit of 0 bytes permits nothing")
    return number


@contextmanager
def limit(size: Union[int, str]) -> Iterator[None]:
    """In a ``with`` block, this process sees GPUs with this much memory: a number of bytes, or such as ``"24GiB"``.

    A request beyond it fails as on a smaller GPU; what other programs use on the GPU counts too. It holds for all
    threads. ``memtrace run --limit`` limits a whole run. Raises :class:`~gpu_memtrace.NotRecordedError` in a process
    that memtrace does not record, and :class:`ValueError` for a value that is not a size.
    """
    number = limit_size(size)
    library = _library.required()
    before = library.set_limit(number)
    try:
        yield
    finally:
        library.set_limit(before)
