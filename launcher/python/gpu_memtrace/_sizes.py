"""Sizes as text."""

from __future__ import annotations

import re


def size_text(size: float) -> str:
    """A number of bytes in binary units: ``4.28 MiB``."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{sign}{size:.0f} B"
    # Three significant digits.
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{sign}{size:.{digits}f} {unit}"


_UNITS = {
    unit: scale
    for power, letter in enumerate("KMGT", start=1)
    for unit, scale in ((f"{letter}iB", 1024**power), (f"{letter}B", 1000**power))
}


def parse_size(size: object) -> int:
    """A number of bytes: an integer, or a text such as ``2GiB``, ``512MiB`` or ``20GB``, as in ``memtrace check``."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)?\s*", size)
        if match is not None:
            number, unit = match.groups()
            if unit in _UNITS:
                return int(float(number) * _UNITS[unit])
            if "." not in number:
                return int(number)
    raise ValueError(f"{size!r} is no size: use a unit such as 2GiB, 512MiB or 20GB, or a number of bytes")
