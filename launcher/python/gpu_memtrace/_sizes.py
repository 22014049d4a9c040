"""Sizes as text."""

from __future__ import annotations


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
