"""Starts installed inference servers in dry runs."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import IO, Dict, List, Union

ROOT = Path(__file__).resolve().parents[2]


def memtrace() -> str:
    """The binary of the release build, unless MEMTRACE_BIN names another one."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("MEMTRACE_BIN", target / "release" / "memtrace"))
    assert path.exists(), f"{path} is missing: run `cargo build --release`"
    return str(path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def installed(*requirements: str) -> str:
    """The folder of the virtual environment of a server, which is the first requirement."""
    return subprocess.run([str(ROOT / "scripts" / "servers"), *requirements], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def dry_run(server: str, command: List[str], options: List[str], settings: Dict[str, str], folder: Path, output: Union[int, IO[str]]) -> "subprocess.CompletedProcess[str]":
    """Runs a command of an installed server in a dry run. `server` is the folder of its environment; the run goes into `folder`."""
    ours = ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment.update(HF_HUB_OFFLINE="1", PATH=f"{server}/bin:{os.environ['PATH']}", **settings)
    run = [memtrace(), "dry-run", *options, "--no-snapshot", "-o", str(folder / "run"), "--", *command]
    return subprocess.run(run, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=1200)
