"""Peaks by category as flat metrics."""

from __future__ import annotations

import itertools
import warnings
from typing import Dict, Optional

from gpu_memtrace import _figures, _library
from gpu_memtrace._annotate import annotate

_GIB = float(1 << 30)
#: The number of the next range. Numbers are never used again, so that each range has a name of its own.
_numbers = itertools.count(1)


def metrics(*, within: Optional[str] = None, device: Optional[int] = None, prefix: str = "memory/") -> Dict[str, float]:
    """The peak so far in GiB, as one number for each name: ``memory/peak_GiB``, ``memory/peak/activation_GiB``, ...

    ``within`` looks only at ranges of :func:`gpu_memtrace.annotate` with this name. ``device`` is a GPU's number, -1
    for the CPU; by default, the GPU with the highest peak. Empty if nothing was allocated there.
    """
    # A part may end before the program uses a device.
    memory = _figures.peak() if within is None else _figures.range_report(within).peaks()
    if device is None:
        gpus = [number for number in memory if number >= 0]
        if not gpus:
            return {}
        device = max(gpus, key=lambda number: memory[number].allocated_bytes)
    if device not in memory:
        return {}
    peak = memory[device]
    found = {f"{prefix}peak_GiB": peak.allocated_bytes / _GIB, f"{prefix}reserved_GiB": peak.reserved_bytes / _GIB}
    for category, amount in peak.by_category.items():
        found[f"{prefix}peak/{category}_GiB"] = amount / _GIB
    return found


class PeakMeter:
    """Measures the peak of one part of a program after another: :meth:`start`, then :meth:`stop` for its metrics.

    Each part is a named range in the report. Without memtrace, both methods do nothing. A recording that cannot be read
    gives a warning, and never an error.
    """

    def __init__(self, name: str = "part", *, device: Optional[int] = None, prefix: str = "memory/") -> None:
        self.name = name
        self.device = device
        self.prefix = prefix
        self._range: Optional[annotate] = None

    @property
    def is_started(self) -> bool:
        """Whether a part has started and not stopped."""
        return self._range is not None

    def start(self) -> None:
        """Starts a part. A part that has not stopped ends here, without metrics."""
        self.cancel()
        if _library.library is not None:
            self._range = annotate(f"{self.name} {next(_numbers)}")
            self._range.__enter__()

    def cancel(self) -> None:
        """Ends the part, without metrics."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def stop(self) -> Dict[str, float]:
        """Ends the part. Returns its :func:`metrics`; they are empty if no part was started."""
        if self._range is None:
            return {}
        name = self._range.name
        self.cancel()
        try:
            return metrics(within=name, device=self.device, prefix=self.prefix)
        except (_library.RecordingError, OSError, ValueError) as error:
            warnings.warn(f"memtrace cannot read the peak of {name}: {error}", RuntimeWarning, stacklevel=2)
            return {}
