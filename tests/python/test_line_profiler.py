"""The line profiler against PyTorch's counters, and what it prints."""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

import pytest
from conftest import Run

Table = List[Tuple[str, str]]


def tables(text: str) -> Dict[str, List[Table]]:
    """Of each table by title: the cells before each line of code that has figures, and the code."""
    found: Dict[str, List[Table]] = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, *lines = part.splitlines()
        rows = [re.fullmatch(r"\s*(\S.*)\s{2,}\d+  \s*(\S.*)", line) for line in lines]
        found.setdefault(title, []).append([(row[1].strip(), row[2]) for row in rows if row])
    return found


def test_figures_are_those_of_pytorch(record: Run) -> None:
    assert record("line_figures.py").stdout == "done\n"


@pytest.mark.parametrize("end", ["return", "exception", "interrupt"])
def test_tables_are_printed_at_any_end(end: str, record: Run) -> None:
    result = record("line_profiler.py", end, SIMCUDA_DEVICES="2", fails=end != "return")
    before, after = result.stdout.split("end of the program\n")
    early, late = tables(before), tables(after)
    assert early == {"every on GPU 0": [[("256 KiB", "allocate(128)")]]}, "after two of three calls"
    assert late["plain on GPU 0"] == [[("10.0 KiB", "allocate(2)")]], "of all threads"
    assert late["Model.forward on GPU 0"] == [[("4.00 KiB", "allocate(4)")]]
    assert late["Model.make on GPU 0"] == [[("8.00 KiB", "allocate(8)")]]
    ((cells, code),) = late["generator on GPU 0"][0]
    assert (cells.split(), code) == (["48.0", "KiB", "3"], "allocate(16)"), "without what its caller allocated"
    assert late["coroutine on GPU 0"] == [[("32.0 KiB", "allocate(32)"), ("64.0 KiB", "allocate(64)")]]
    assert "# a comment" in after and "disabled" not in after
    assert [code for _, code in late["devices on GPU 0"][0]] == ['allocate(256, "cuda:0")']
    assert [code for _, code in late["devices on GPU 1"][0]] == ['allocate(512, "cuda:1")']
    assert "unused has neither allocated nor freed GPU memory" in after
    if end != "return":
        assert ("KeyboardInterrupt" if end == "interrupt" else "on purpose") in result.stderr


def test_only_chosen_devices_are_shown(record: Run) -> None:
    result = record("line_profiler.py", "targets", SIMCUDA_DEVICES="2")
    late = tables(result.stdout.split("end of the program\n")[1])
    assert list(late) == ["devices on GPU 1"], "no other function used GPU 1"
