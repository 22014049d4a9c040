"""A process that records itself: figures, errors, and what happens to a program that does anything meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROGRAMS, Run, environment

CASES = ["figures", "exception", "threads", "fork", "interrupt", "ignored", "launcher", "many"]


@pytest.mark.parametrize("case", CASES)
def test_recorder(case: str, alone: Run, tmp_path: Path) -> None:
    result = alone("recorder.py", case, str(tmp_path / "run"))
    assert result.stdout == "done\n"
    has_summary = "memtrace attached" in result.stderr
    assert has_summary == (case in ("figures", "exception")), result.stderr


@pytest.mark.parametrize("case", ["killed", "ends"])
def test_a_process_that_ends_leaves_its_reports(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(PROGRAMS / "recorder.py"), case, str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (case == "ends"), done.stderr
    assert done.stdout == "done\n", done.stderr
    until = time.monotonic() + 60
    while not (folder / "summary.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (process,) = json.loads((folder / "summary.json").read_text())["processes"]
    assert process["devices"][0]["peak"]["totals"]["allocated_bytes"] == 8 << 20


def test_a_process_of_memtrace_has_a_recording_already(record: Run, tmp_path: Path) -> None:
    assert record("recorder.py", "recorded", str(tmp_path / "other")).stdout == "done\n"


def test_the_kernel_may_forbid_it(tmp_path: Path) -> None:
    # A process that is not dumpable can be traced only with a capability that root has.
    command = [sys.executable, str(PROGRAMS / "recorder.py"), "forbidden", str(tmp_path / "run")]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", *command]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_pytorch_must_be_there(alone: Run) -> None:
    program = "import gpu_memtrace; gpu_memtrace.Recorder('run').start()"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert "PyTorch is not imported; import torch before" in done.stderr.splitlines()[-1]
