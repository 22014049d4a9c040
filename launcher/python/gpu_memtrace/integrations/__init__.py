"""The peak of GPU memory in other programs' terms: metrics of experiment trackers, and callbacks of trainers.

The submodules ``lightning`` and ``transformers`` need these packages; nothing here imports them.
"""

from gpu_memtrace.integrations._metrics import PeakMeter, metrics

__all__ = ["PeakMeter", "metrics"]
