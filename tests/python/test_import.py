"""An import costs a program next to nothing: a module is imported when one of its names is first used."""

from __future__ import annotations

import sys

import pytest
from conftest import Run
from test_api import other_pythons

# Modules of the standard library that are not imported before every program, or not by every Python. They import nothing else.
SMALL = {"__future__", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "types", "_types", "warnings"}


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()], ids=lambda path: path.split("/")[-3])
def test_few_modules_without_memtrace(python: str, alone: Run) -> None:
    imported, used = (set(line.split()) for line in alone("imports.py", python=python).stdout.splitlines())
    assert imported <= {"gpu_memtrace", "gpu_memtrace._library"} | SMALL, imported
    assert used <= {"gpu_memtrace._annotate"} | SMALL, used


def test_few_modules_under_memtrace(record: Run) -> None:
    imported, _ = (set(line.split()) for line in record("imports.py").stdout.splitlines())
    others = imported - {"gpu_memtrace", "gpu_memtrace._library"} - SMALL
    # The functions of the preloaded library are called with ctypes.
    assert {name.partition(".")[0].lstrip("_") for name in others} - SMALL == {"ctypes", "struct"}, others
