"""The API against PyTorch's own figures, and what it does without a recording."""

from __future__ import annotations

import glob
import os
import sys
import time
from pathlib import Path
from typing import List

import pytest
from conftest import PROGRAMS, Run, environment, finished, memtrace

KIB = 1024


def test_figures_are_those_of_pytorch(record: Run, tmp_path: Path) -> None:
    result = record("figures.py", str(tmp_path / "snapshot.pickle"), SIMCUDA_DEVICES="2")
    assert result.stdout == "done\n"
    # memtrace itself, run by the program, is neither recorded nor reported as unrecordable.
    summary = result.summary()
    assert len(summary["processes"]) == 1 and summary["unrecordable"] == [] and summary["losses"] == {}


def test_peaks_within_ranges_are_those_of_pytorch(record: Run) -> None:
    assert record("peak_within.py", SIMCUDA_DEVICES="2").summary()["losses"] == {}


def test_ranges_have_what_happened_inside(record: Run) -> None:
    result = record("ranges.py")
    labels = result.labels()
    found = {name: (label["api"], label["times"], label["allocated_bytes"] // KIB) for name, label in labels.items()}
    long_name = next(name for name in found if name.startswith("name with"))
    assert found.pop(long_name) == ("annotate", 1, 2)
    assert long_name.startswith("name with   and ? and xxx") and len(long_name.encode()) == 1024
    assert found == {
        "first": ("annotate", 1, 2),
        "function": ("annotate", 1, 4),
        "recursive": ("annotate", 3, 48),
        # Three resumptions of the first one, three of the second one, two of the third one.
        "generator": ("annotate", 8, 2 * 4 + 128 + 4 + 64 + 128 + 4 + 128),
        "coroutine": ("annotate", 2, 2),
        "async generator": ("annotate", 7, 24),
        "method": ("annotate", 1, 32),
        "class method": ("annotate", 1, 32),
        "failing": ("annotate", 1, 1),
        "outer": ("annotate", 1, 2),
        "inner": ("annotate", 2, 3),
        "same object": ("annotate", 2, 2),
        "thread": ("annotate", 8, 16),
    }
    text = (result.folder / "summary.txt").read_text()
    assert "not in this trace" in text or result.summary()["processes"][0]["losses"], "the pause is reported"


def test_nothing_happens_without_memtrace(alone: Run) -> None:
    result = alone("unrecorded.py")
    assert result.stdout.startswith("done\n")
    assert "memtrace -- python train.py" in result.stdout + result.stderr, "@profile says so at the end"


def test_children_and_replaced_images(record: Run) -> None:
    assert record("processes.py").stdout == "True\ndone\n"


def test_cpu_tensors(record: Run) -> None:
    result = record("host.py", options=["--cpu", "always"])
    assert result.labels(-1)["host"]["allocated_bytes"] == 1 << 20


def test_a_stopped_launcher_is_not_waited_for_without_a_limit(record: Run) -> None:
    assert record("launcher_gone.py").stdout == "done\n"


def test_an_ended_launcher_is_not_waited_for(tmp_path: Path) -> None:
    output = tmp_path / "output"
    folder = tmp_path / "run"
    # The program outlives the launcher, so its output goes to a file.
    script = f'exec "{sys.executable}" "{PROGRAMS}/launcher_gone.py" kill >"{output}" 2>&1'
    finished([memtrace(), "--quiet", "-o", str(folder), "--", "sh", "-c", script], environment(), folder)
    until = time.monotonic() + 60
    while "done" not in output.read_text() and "Error" not in output.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert output.read_text() == "done\n"


def test_the_program_is_found_on_path(record: Run, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "memtrace").symlink_to(memtrace())
    found = record("binary.py", MEMTRACE_BIN="", PATH=f"{folder}:/usr/bin:/bin")
    assert found.stdout == f"{1 << 20}\n"


def test_the_missing_program_is_named(record: Run) -> None:
    missing = record("binary.py", MEMTRACE_BIN="", PATH="/nonexistent")
    assert missing.stdout.startswith("cannot find the binary memtrace of ") and "MEMTRACE_BIN" in missing.stdout


def other_pythons() -> List[str]:
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    return sorted(path for minor in range(9, 15) for path in glob.glob(f"{root}/versions/3.{minor}.*/bin/python"))


@pytest.mark.parametrize("python", other_pythons(), ids=lambda path: path.split("/")[-3])
def test_every_python(python: str, record: Run, alone: Run) -> None:
    assert alone("unrecorded.py", python=python).stdout.startswith("done\n")
    assert record("other_pythons.py", python=python).stdout.endswith("\ndone\n")
