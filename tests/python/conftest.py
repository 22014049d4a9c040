"""Runs programs under memtrace, over the simulated CUDA. `scripts/test python` starts this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "launcher" / "python"
PROGRAMS = Path(__file__).parent / "programs"


def memtrace() -> str:
    """The binary of the release build, unless MEMTRACE_BIN names another one."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("MEMTRACE_BIN", target / "release" / "memtrace"))
    assert path.exists(), f"{path} is missing: run `cargo build --release`"
    return str(path)


@dataclass
class Recorded:
    """A program that has ended, and its run folder."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    def summary(self) -> Dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def labels(self, device: int = 0) -> Dict[str, Dict[str, Any]]:
        """The named ranges of the only process, by name."""
        (process,) = self.summary()["processes"]
        (found,) = (d for d in process["devices"] if d["device"] == device)
        return {label["name"]: label for label in found["labels"]}


Run = Callable[..., Recorded]


def environment(**changes: str) -> Dict[str, str]:
    result = {**os.environ, "PYTHONPATH": str(PACKAGE), "MEMTRACE_BIN": memtrace(), **changes}
    # The caches of the tests are those of the environment, and not those of one run.
    result["PYTHONDONTWRITEBYTECODE"] = "1"
    return result


def finished(command: List[str], env: Dict[str, str], folder: Path) -> Recorded:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder.parent)
    return Recorded(folder, done.returncode, done.stdout, done.stderr)


@pytest.fixture
def record(tmp_path: Path) -> Run:
    """Runs a program of `programs` under memtrace. It must end well, unless `fails` is set."""

    def run(
        program: str,
        *arguments: str,
        options: Optional[List[str]] = None,
        python: str = sys.executable,
        fails: bool = False,
        **env: str,
    ) -> Recorded:
        folder = tmp_path / "run"
        command = [memtrace(), "--quiet", "-o", str(folder), *(options or []), "--"]
        result = finished([*command, python, str(PROGRAMS / program), *arguments], environment(**env), folder)
        assert (result.returncode != 0) == fails, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    return run


@pytest.fixture
def alone(tmp_path: Path) -> Run:
    """Runs a program without memtrace."""

    def run(program: str, *arguments: str, python: str = sys.executable, **env: str) -> Recorded:
        result = finished([python, str(PROGRAMS / program), *arguments], environment(**env), tmp_path / "run")
        assert result.returncode == 0, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    return run
