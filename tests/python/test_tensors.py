"""The table of tensors against PyTorch's counters."""

from __future__ import annotations

from conftest import Run


def test_the_table(record: Run) -> None:
    assert record("tensor_table.py").stdout == "done\n"


def test_the_table_without_memtrace(alone: Run) -> None:
    assert alone("tensor_table_alone.py").stdout == "done\n"
