"""memtrace: a GPU-memory flight recorder. `memtrace -- python train.py` records an unmodified program."""

__version__ = "0.1.0"
