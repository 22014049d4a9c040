"""Runs Ray under memtrace, and reads partitioned tables in query engines, over the simulated CUDA. `scripts/test engines` starts this."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "how-to" / "many-hosts.md"


def memtrace() -> str:
    """The binary of the release build, unless MEMTRACE_BIN names another one."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("MEMTRACE_BIN", target / "release" / "memtrace"))
    assert path.exists(), f"{path} is missing: run `cargo build --release`"
    return str(path)


def code_of_page(mark: str) -> str:
    """The code block of the page about many hosts below the comment with this mark."""
    found = re.search(rf"^<!-- {mark} -->\n\n((?:    .*\n|\n)+)", PAGE.read_text(), flags=re.M)
    assert found is not None, f"{PAGE} has no block {mark}"
    return re.sub(r"^    ", "", found.group(1), flags=re.M)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder with a short path: Ray makes sockets below it, whose paths have at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mt", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def environment(folder: Path) -> Dict[str, str]:
    """Ray, Spark and PyTorch with files of their own, and without the cluster of the user."""
    packages = os.environ["PYTHONPATH"].split(os.pathsep)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([os.environ["PATH"], *[str(Path(package) / "bin") for package in packages]]),
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


@pytest.fixture(scope="session", autouse=True)
def environment_of_this_process(environment: Dict[str, str]) -> None:
    os.environ.update(environment)


def run(*command: object, environment: Dict[str, str], **more: str) -> str:
    """Runs a command that succeeds, and returns its stdout."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**environment, **more}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def report(path: Path) -> Dict[str, Any]:
    """The report of the job, by `memtrace report DIR`."""
    return json.loads(run(memtrace(), "report", path, "--ranks", "--json", environment=dict(os.environ)))


class Job:
    """A job of four ranks in two runs of torchrun, and of one process without a rank."""

    def __init__(self, folder: Path, environment: Dict[str, str]) -> None:
        self.runs, self.tables, measured = folder / "runs", folder / "tables", folder / "measured"
        measured.mkdir()
        port = str(free_port())
        under_memtrace = [memtrace(), "--job", "engines", "--runs", str(self.runs), "--"]
        nodes: List[subprocess.Popen[bytes]] = []
        for node in "01":
            torchrun = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
            command = [*under_memtrace, *torchrun, str(ROOT / "tests/programs/distributed/hosts.py"), str(measured)]
            nodes.append(subprocess.Popen(command, env={**environment, "SIMCUDA_DEVICES": "2"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        assert [node.wait(timeout=500) for node in nodes] == [0, 0]
        helper = "import torch; torch.empty(9 << 20, dtype=torch.uint8, device='cuda')"
        run(*under_memtrace, "python", "-c", helper, environment=environment)
        run(memtrace(), "export", self.runs, "--to", "parquet", "--partition", "-o", self.tables, environment=environment)
        self.measured = [json.loads((measured / f"{rank}.json").read_text()) for rank in range(4)]
        self.report = report(self.runs)

    def reported_phases(self) -> Dict[tuple[int, str], int]:
        """The peak of each phase of each rank, as the report has it."""
        return {(rank["rank"], row["phase"]): row["peak_bytes"] for rank in self.report["ranks"] for row in rank["phases"]}


@pytest.fixture(scope="session")
def job(folder: Path, environment: Dict[str, str]) -> Job:
    return Job(folder, environment)
