"""Dry runs of inference servers, against what the servers themselves log. `scripts/test servers` starts this.

The models are configurations without weights. An engine starts, allocates its cache, and answers `/health`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(__file__).parent / "models"
GIB = 1 << 30


class Engine(NamedTuple):
    """How to start an engine, and what its log says."""

    package: str
    command: List[str]
    # The memory that loading the weights took, in GiB.
    weights: str
    # The tokens for which its cache has room.
    tokens: str
    # What its users set on a machine without the CUDA toolkit.
    environment: Dict[str, str] = {}
    # How much more than the weights its log may have, in GiB: the unused parts of PyTorch's segments of 20 MiB, where it
    # compares the free memory of the device.
    unused: float = 0.0


ENGINES = {
    "vllm": Engine(
        "vllm==0.33.0",
        ["{folder}/bin/vllm", "serve", "{model}", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--port", "{port}"],
        r"Model loading took ([\d.]+) GiB",
        r"GPU KV cache size: ([\d,]+) tokens",
    ),
    "sglang": Engine(
        "sglang==0.5.23",
        ["{folder}/bin/python", "-m", "sglang.launch_server", "--model-path", "{model}", "--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "triton",
         "--sampling-backend", "pytorch", "--disable-cuda-graph", "--port", "{port}"],
        r"Load weight end\..*mem usage=([\d.]+) GB",
        r"max_total_num_tokens=(\d+)",
        {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
        20 / 1024,
    ),
}


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


def server_of(summary: Dict[str, Any]) -> Dict[str, Any]:
    """The only server of a run."""
    devices = [device for process in summary["processes"] for device in process["devices"]]
    servers = [device["server"] for device in devices if device.get("server")]
    assert len(servers) == 1, [device["device"] for device in devices]
    return servers[0]


def dry_run(engine: Engine, model: str, settings: Dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Starts an engine in a dry run, until it is ready."""
    installed = subprocess.run([str(ROOT / "scripts" / "servers"), engine.package], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    values = {"folder": installed, "model": str(MODELS / model), "port": str(free_port())}
    command = [word.format(**values) for word in engine.command]
    ours = ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment.update(HOME=str(folder), HF_HUB_OFFLINE="1", PATH=f"{installed}/bin:{os.environ['PATH']}", **settings)
    run = [memtrace(), "dry-run", "--gpu", "h100-sxm", "--until-ready", "--no-snapshot", "-o", str(folder / "run"), "--", *command]
    return subprocess.run(run, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("name", list(ENGINES))
def test_a_server_boots_and_its_figures_are_those_of_its_log(name: str, model: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    output = dry_run(engine, model, engine.environment, tmp_path)
    log = output.stdout
    assert output.returncode == 0, log[-6000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["run"]["simulated"]["was_ready"], log[-6000:]
    server = server_of(summary)

    parts = {part["kind"]: part["bytes"] for part in server["parts"]}
    (weights,) = re.findall(engine.weights, log)
    # The log has the weights in hundredths or tenths of a GiB, with what else loading allocated.
    rounding = 1.1 * 10 ** -len(weights.partition(".")[2])
    assert -rounding <= float(weights) - parts["weights"] / GIB <= rounding + engine.unused, (parts, weights)
    tokens = int(re.findall(engine.tokens, log)[-1].replace(",", ""))
    assert server["kv_cache"]["tokens"] == pytest.approx(tokens, rel=0.001), server["kv_cache"]
    assert parts["kv_cache"] == server["kv_cache"]["bytes"]
    stages = [stage["stage"] for stage in server["stages"]]
    assert {"load", "kv_cache"} <= set(stages), stages
    text = (tmp_path / "run" / "summary.txt").read_text()
    assert not re.search(r"\b(half the batch|epochs?|backward|optimizer|One step)\b", text), text


@pytest.mark.skipif(shutil.which("nvcc") is not None or Path("/usr/local/cuda").exists(), reason="this machine has the CUDA toolkit")
def test_a_package_that_needs_the_cuda_toolkit_is_named(tmp_path: Path) -> None:
    output = dry_run(ENGINES["sglang"], "dense", {}, tmp_path)
    assert output.returncode == 1, output.stdout[-6000:]
    assert "memtrace: warning: deep_gemm needs the CUDA toolkit, which this machine lacks (AssertionError at " in output.stdout
    assert "memtrace: help: set CUDA_HOME " in output.stdout and "SGLANG_ENABLE_JIT_DEEPGEMM=0" in output.stdout
    assert "no process of the command used CUDA" not in output.stdout, output.stdout[-2000:]
