"""Sizes as pytorch_memlab prints them: ``4.00M``."""

from __future__ import annotations

from math import isnan
from typing import Any

_UNITS = "BKMGTPEZY"


class ByteSize:
    """A number of bytes. ``format(size, ".2f")`` has the unit after the number."""

    def __init__(self, amount: float) -> None:
        self.amount = float(amount)
        self.unit = _UNITS[0]
        for unit in _UNITS:
            self.unit = unit
            if abs(self.amount) < 1024 or unit == _UNITS[-1]:
                break
            self.amount /= 1024

    def __format__(self, spec: str) -> str:
        return format(self.amount, spec) + self.unit

    def __str__(self) -> str:
        return format(self, ".0f")


def calmsize(num_bytes: Any) -> Any:
    """The size of a number of bytes."""
    return ByteSize(num_bytes)


def readable_size(num_bytes: Any) -> str:
    """A number of bytes as text; empty for NaN."""
    try:
        if isnan(num_bytes):
            return ""
    except TypeError:
        pass
    size = calmsize(num_bytes)
    try:
        return f"{size:.2f}"
    except TypeError:
        return str(size)
