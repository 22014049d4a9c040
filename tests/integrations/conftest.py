"""Runs the examples of docs/how-to with the real packages, over the simulated CUDA. `scripts/test integrations` starts this."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "launcher" / "python"
PROGRAMS = Path(__file__).parent / "programs"
ENTRY_POINTS = """\
[pytest11]
memtrace = gpu_memtrace.pytest_plugin
"""


def memtrace() -> str:
    """The binary of the release build, unless MEMTRACE_BIN names another one."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("MEMTRACE_BIN", target / "release" / "memtrace"))
    assert path.exists(), f"{path} is missing: run `cargo build --release`"
    return str(path)


def blocks(page: str, language: str) -> List[str]:
    """The code blocks of a how-to guide in this language."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@dataclass
class Workplace:
    """A folder, and the environment of a user who has installed the wheel and the packages of requirements.txt."""

    folder: Path
    environment: Dict[str, str]

    def run(self, *command: object, fails: bool = False, **env: str) -> Result:
        words = [str(word) for word in command]
        environment = {**self.environment, **env}
        done = subprocess.run(words, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=500)
        result = Result(done.returncode, done.stdout, done.stderr)
        assert (done.returncode != 0) == fails, f"{words}: {done.returncode}\n{result.output}"
        return result

    def record(self, *command: object, fails: bool = False, **env: str) -> Result:
        """Runs a command under memtrace, into the folder `run`."""
        return self.run(memtrace(), "-o", "run", "--", *command, fails=fails, **env)

    def summary(self, run: str = "run") -> Dict[str, Any]:
        return json.loads((self.folder / run / "summary.json").read_text())

    def write(self, pages: Sequence[str]) -> List[str]:
        """Writes code blocks whose first line is a comment with the name of the file. Returns these names."""
        names = []
        for block in pages:
            found = re.match(r"# (\S+)\n", block)
            assert found is not None, f"the first line of the block names no file:\n{block}"
            (self.folder / found.group(1)).write_text(block)
            names.append(found.group(1))
        return names


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    # An installer makes these of pyproject.toml: the names of the distribution and its entry points.
    site = tmp_path / "site"
    info = site / "gpu_memtrace-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-memtrace\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    packages = os.environ["PYTHONPATH"].split(os.pathsep)
    folder = tmp_path / "work"
    folder.mkdir()
    binaries = [str(Path(package) / "bin") for package in packages]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(PACKAGE), *packages]),
        "PATH": os.pathsep.join([os.environ["PATH"], *binaries]),
        "MEMTRACE_BIN": memtrace(),
        "PYTHONDONTWRITEBYTECODE": "1",
        # No test uses the network, or files of the user.
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    # The tests themselves can run in an environment that --memtrace or pytest-xdist made.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return Workplace(folder, environment)


def python() -> str:
    return sys.executable
