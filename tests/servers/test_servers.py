"""Dry runs of inference servers, against what the servers themselves log. `scripts/test servers` starts this.

The models are configurations without weights. An engine starts, allocates its cache, and answers `/health`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import published
import pytest
from dry_runs import dry_run, free_port, installed

MODELS = Path(__file__).parent / "models"
GIB = 1 << 30
# An executor of vLLM, which has it as an optional package.
RAY = "ray==2.60.0"


class Engine(NamedTuple):
    """How to start an engine, and what its log says."""

    packages: List[str]
    command: List[str]
    # The memory that loading the weights took, in GiB.
    weights: str
    # The tokens for which its cache has room.
    tokens: str
    # How much more than the weights its log may have, in GiB: the unused parts of PyTorch's segments of 20 MiB, where it
    # compares the free memory of the device.
    unused: float = 0.0


ENGINES = {
    "vllm": Engine(
        ["vllm==0.33.0", RAY],
        ["{folder}/bin/vllm", "serve", "{model}", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--port", "{port}"],
        r"Model loading took ([\d.]+) GiB",
        r"GPU KV cache size: ([\d,]+) tokens",
    ),
    "sglang": Engine(
        ["sglang==0.5.23"],
        ["{folder}/bin/python", "-m", "sglang.launch_server", "--model-path", "{model}", "--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "triton",
         "--sampling-backend", "pytorch", "--disable-cuda-graph", "--port", "{port}"],
        r"Load weight end\..*mem usage=([\d.]+) GB",
        r"max_total_num_tokens=(\d+)",
        20 / 1024,
    ),
}


def server_of(summary: Dict[str, Any]) -> Dict[str, Any]:
    """The only server of a run."""
    devices = [device for process in summary["processes"] for device in process["devices"]]
    servers = [device["server"] for device in devices if device.get("server")]
    assert len(servers) == 1, [device["device"] for device in devices]
    return servers[0]


def boot(engine: Engine, model: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Starts an engine in a dry run, until it is ready."""
    server = installed(*engine.packages)
    values = {"folder": server, "model": str(MODELS / model), "port": str(free_port())}
    command = [word.format(**values) for word in engine.command]
    return dry_run(server, command, ["--gpu", "h100-sxm", "--until-ready"], {"HOME": str(folder)}, folder, subprocess.PIPE)


def program_of_vllm(name: str, arguments: List[str], options: List[str], folder: Path) -> "tuple[str, Dict[str, Any]]":
    """Runs a program of this folder with vLLM to its end. Returns its output and the summary."""
    server = installed(*ENGINES["vllm"].packages)
    command = [f"{server}/bin/python", str(Path(__file__).parent / "programs" / name), str(MODELS / "dense"), *arguments]
    output = dry_run(server, command, options, {"HOME": str(folder)}, folder, subprocess.PIPE)
    assert output.returncode == 0, output.stdout[-6000:]
    return output.stdout, json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("name", list(ENGINES))
def test_a_server_boots_and_its_figures_are_those_of_its_log(name: str, model: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    output = boot(engine, model, tmp_path)
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
def test_a_package_that_needs_the_cuda_toolkit_is_left_out_or_named(tmp_path: Path) -> None:
    server = installed(*ENGINES["sglang"].packages)
    command = [f"{server}/bin/python", "-c", "import torch; torch.zeros(1, device='cuda'); import deep_gemm"]
    output = dry_run(server, command, ["--gpu", "h100-sxm"], {"HOME": str(tmp_path)}, tmp_path, subprocess.PIPE)
    assert output.returncode == 1, output.stdout[-6000:]
    assert "ImportError: DeepGEMM needs the CUDA toolkit" in output.stdout
    assert "memtrace: warning: deep_gemm needs the CUDA toolkit, which this machine lacks (AssertionError at " in output.stdout
    assert "memtrace: help: set CUDA_HOME " in output.stdout and "SGLANG_ENABLE_JIT_DEEPGEMM=0" in output.stdout


@pytest.mark.parametrize("level", [1, 2])
def test_memory_that_vllm_unmaps_while_a_trainer_works_is_not_in_use(level: int, tmp_path: Path) -> None:
    log, summary = program_of_vllm("reinforcement.py", [str(level)], ["--gpu", "a100-40gb"], tmp_path)
    printed = [json.loads(line.split(" ", 1)[1]) for line in log.splitlines() if line.startswith("memory ")]
    most = {when: {kind: max(one[kind] for one in printed if one["when"] == when) for kind in ("peak", "used")} for when in ("start", "rollout", "train")}
    (device,) = [device for process in summary["processes"] for device in process["devices"]]
    activities = {one["activity"]: one for one in device["colocation"]["activities"]}
    assert activities["rollout"]["bytes"] == most["rollout"]["peak"] and activities["rollout"]["paused_bytes"] == 0
    train = activities["train"]
    assert train["bytes"] == most["train"]["peak"] - train["paused_bytes"], (train, most)
    freed = re.findall(r"sleep freed ([\d.]+) GiB memory in total", log)
    assert len(freed) == 3 and train["paused_bytes"] / GIB == pytest.approx(float(freed[0]), rel=0.001), (train, freed)
    # The device has what PyTorch caches, too.
    for when, activity in activities.items():
        used = most[when]["used"] - most["start"]["used"]
        assert 0.7 * used <= activity["bytes"] <= used, (activity, most)


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_workers_of_an_executor_are_recorded_without_losses(executor: str, tmp_path: Path) -> None:
    log, summary = program_of_vllm("executor.py", [executor], ["--gpu", "h100-sxm", "--gpus", "2"], tmp_path)
    assert "answered 8" in log
    assert summary["losses"] == {}, summary["losses"]
    servers = [device["server"] for process in summary["processes"] for device in process["devices"]]
    (tokens,) = set(re.findall(r"GPU KV cache size: ([\d,]+) tokens", log))
    assert [server["kv_cache"]["tokens"] for server in servers] == [int(tokens.replace(",", ""))] * 2
    # The scheduler allocates nothing on a GPU, in neither.
    assert all("has a process without a GPU" in server["kv_cache"]["usage_unknown"] for server in servers), servers[0]["kv_cache"]


def test_the_page_has_the_table_of_published_logs() -> None:
    data = json.loads(published.DATA.read_text())
    page = (published.ROOT / "docs" / "dev" / "dry-run.md").read_text()
    assert published.table(data) in page, "python3 tests/servers/published.py --table"


def test_figures_are_found_in_logs_of_old_and_new_servers() -> None:
    old = """model_runner.py:1115] Loading model weights took 13.9476 GB
    worker.py:267] model weights take 13.95GiB; PyTorch activation peak memory takes 1.41GiB; the rest of the memory reserved for KV Cache is 7.34GiB.
    worker.py:267] model weights take 13.95GiB; PyTorch activation peak memory takes 0.25GiB; the rest of the memory reserved for KV Cache is 8.69GiB.
    executor_base.py:112] # cuda blocks: 5096, # CPU blocks: 2730"""
    assert published.figures_of(old) == {"weights_gib": 13.9476, "activations_gib": 1.41, "kv_cache_gib": 7.34, "kv_cache_tokens": 81536}
    new = "Model loading took 14.96 GiB memory and 1 seconds\nAvailable KV cache memory: 55.06 GiB\nGPU KV cache size: 451,056 tokens"
    assert published.figures_of(new) == {"weights_gib": 14.96, "kv_cache_gib": 55.06, "kv_cache_tokens": 451056}
    assert published.figures_of("Load weight end. mem usage=56.98 GB.\nmax_total_num_tokens=94657") == {"weights_gib": 56.98, "kv_cache_tokens": 94657}
