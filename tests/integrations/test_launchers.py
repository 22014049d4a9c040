"""Programs that launchers start. The program has no line for memtrace, and runs out of memory in one rank."""

from __future__ import annotations

import socket
from typing import List

import pytest
from conftest import PROGRAMS, Workplace

PROGRAM = PROGRAMS / "oom_in_rank_1.py"
# As docs/how-to/distributed.md has them.
LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"],
    "deepspeed": ["deepspeed", "--num_gpus", "2"],
}
PORT_OPTIONS = {"torchrun": "--master-port", "accelerate": "--main_process_port", "deepspeed": "--master_port"}


def launcher(name: str) -> List[str]:
    """The command, with a free port: each launcher has 29500 as its default, which another job of this machine may use."""
    with socket.socket() as free:
        free.bind(("", 0))
        return [*LAUNCHERS[name], PORT_OPTIONS[name], str(free.getsockname()[1])]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_rank_that_runs_out_of_memory(workplace: Workplace, name: str) -> None:
    alone = workplace.run(*launcher(name), PROGRAM, fails=True, SIMCUDA_DEVICES="2")
    result = workplace.record(*launcher(name), PROGRAM, fails=True, SIMCUDA_DEVICES="2")
    assert result.returncode == alone.returncode == 1
    assert "x CUDA out of memory on rank 1, GPU 1" in result.stderr
    assert "oom_in_rank_1.py:14" in result.stderr
    # The program's own error is as it is without memtrace.
    errors = [line for line in result.output.splitlines() if "torch.OutOfMemoryError" in line]
    assert errors == [line for line in alone.output.splitlines() if "torch.OutOfMemoryError" in line] != []

    summary = workplace.summary()
    assert summary["run"]["exit"] == {"code": 1}
    assert "out-of-memory error in rank 1" in summary["run"]["outcome"]
    ranks = {process["rank"]: process for process in summary["processes"]}
    assert sorted(ranks) == [0, 1] and {process["world_size"] for process in ranks.values()} == {2}
    (device,) = ranks[1]["devices"]
    (oom,) = device["ooms"]
    # 2 ** 33 elements of 4 bytes. Three blocks of 256 MiB are allocated.
    assert oom["requested_bytes"] == 1 << 35
    assert oom["in_use"]["totals"]["allocated_bytes"] == 3 << 28
    assert oom["requested_at"]["location"].endswith("oom_in_rank_1.py:14")
    assert [d["oom_count"] for d in ranks[0]["devices"]] == [0]
    assert summary["losses"] == {}


def test_a_worker_that_uses_the_package(workplace: Workplace) -> None:
    """memtrace in the worker's environment: each rank reads its own figures."""
    program = workplace.folder / "worker.py"
    program.write_text(
        "import os, torch, gpu_memtrace\n"
        "rank = int(os.environ['RANK'])\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "with gpu_memtrace.annotate('part'):\n"
        "    block = torch.empty((rank + 1) << 20, dtype=torch.uint8, device='cuda')\n"
        "peak = gpu_memtrace.peak(within='part')\n"
        "assert peak[int(os.environ['LOCAL_RANK'])].allocated_bytes == (rank + 1) << 20 == torch.cuda.max_memory_allocated()\n"
        "assert len(peak) == 1 and gpu_memtrace.is_recording()\n"
    )
    workplace.record(*launcher("torchrun"), program, SIMCUDA_DEVICES="2")
    assert sorted(process["rank"] for process in workplace.summary()["processes"]) == [0, 1]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_page_has_the_command(name: str) -> None:
    from conftest import ROOT

    page = (ROOT / "docs" / "how-to" / "distributed.md").read_text()
    assert f"memtrace -- {' '.join(LAUNCHERS[name])} train.py" in page.replace(" 8 ", " 2 ")
