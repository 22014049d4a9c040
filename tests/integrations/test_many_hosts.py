"""The commands of docs/how-to/many-hosts.md, in Slurm on two hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from conftest import PROGRAMS, ROOT, memtrace

# The exit status of `hosts.sh` where the machine does not permit namespaces.
SKIPPED = 77
SLURM = ["munged", "slurmctld", "slurmd", "sbatch", "srun"]
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    # DeepSpeed's own optimizer is a CUDA kernel that it compiles.
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto"}},
}


def commands() -> List[str]:
    """The commands of the page that begin with `srun`, of four hosts with eight GPUs each, in the sections from Slurm to DeepSpeed."""
    page = (ROOT / "docs" / "how-to" / "many-hosts.md").read_text()
    section = page[page.index("\n## Slurm\n") : page.index("\n## Ray Train\n")].replace("\\\n", "")
    return re.findall(r"^    (srun .*)$", section, flags=re.M)


def on_two_hosts(command: str, program: str) -> str:
    """The command for two hosts with two GPUs each, with this program."""
    for option in ["--nnodes", "--num_machines"]:
        command = command.replace(f"{option} 4 ", f"{option} 2 ")
    for option in ["--nproc-per-node", "--ntasks-per-node"]:
        command = command.replace(f"{option} 8 ", f"{option} 2 ")
    command = command.replace("--num_processes 32 ", "--num_processes 4 ")
    command, count = re.subn(r"\btrain\.py", lambda _: program, command)
    assert count == 1 and not re.search(r" (8|32) ", command), command
    return command


class Jobs:
    """The files that a job leaves for each launcher."""

    PROGRAMS = {
        "torchrun": f"{ROOT}/tests/programs/distributed/hosts.py $FOLDER",
        **{how: f"{PROGRAMS}/many_hosts.py {how} $FOLDER" for how in ["plain", "lightning", "accelerate", "deepspeed"]},
    }
    # The tasks of Slurm on each host: a launcher that starts the ranks, or the ranks themselves.
    TASKS = {"torchrun": 1, "plain": 2, "lightning": 2, "accelerate": 1, "deepspeed": 1}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = commands()
        assert len(found) == len(self.PROGRAMS), found
        for command, (name, program) in zip(found, self.PROGRAMS.items()):
            own = folder / name
            own.mkdir()
            (own / "ds.json").write_text(json.dumps(ZERO_2))
            ended = f"trap 'echo $? >{own}.new; mv {own}.new {own}.status' EXIT"
            lines = ["#!/bin/bash", f"#SBATCH --nodes=2 --ntasks-per-node={self.TASKS[name]}", ended, f"cd {own}", f"export FOLDER={own} SCRATCH={own}"]
            lines += ["export MASTER_ADDR=$(hostname)", on_two_hosts(command, program), ""]
            (folder / f"{name}.sbatch").write_text("\n".join(lines))
        # A short name for the binary, as users have it.
        (folder / "bin").mkdir()
        (folder / "bin" / "memtrace").symlink_to(memtrace())

    def run(self) -> None:
        packages = os.environ["PYTHONPATH"].split(os.pathsep)
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"], *[str(Path(package) / "bin") for package in packages]])
        settings = {"SIMCUDA_DEVICES": "2", "OMP_NUM_THREADS": "1", "HOME": str(self.folder), "HF_HUB_OFFLINE": "1", "PATH": path}
        # Nothing of a host outlives its first process, because each host has process numbers of its own.
        host = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", str(PROGRAMS / "slurm_host.sh"), "{host}", str(self.folder)]
        hosts = [str(ROOT / "tests/programs/distributed/hosts.sh"), *host]
        done = subprocess.run(hosts, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900)
        if done.returncode == SKIPPED:
            pytest.skip(done.stderr)
        if (self.folder / "why").exists():
            pytest.skip("Slurm does not start here: " + (self.folder / "why").read_text())
        assert done.returncode == 0, done.stdout + done.stderr

    def report(self, name: str) -> Dict[str, Any]:
        """`memtrace report`, after a job that has ended well."""
        status, output = self.folder / f"{name}.status", self.folder / f"{name}.out"
        assert status.exists() and status.read_text() == "0\n", output.read_text() if output.exists() else "the job did not begin"
        words = [memtrace(), "report", str(self.folder / name / "runs"), "--json"]
        return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    missing = [name for name in SLURM if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("as root, with Slurm (Debian: apt-get install slurmctld slurmd slurm-client munge)")
    # munge wants a folder below folders that only their owners can write, or with the sticky bit.
    folder = Path(tempfile.mkdtemp(prefix="mt", dir="/tmp"))
    folder.chmod(0o755)
    try:
        jobs = Jobs(folder)
        jobs.run()
        yield jobs
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", Jobs.PROGRAMS)
def test_slurm(jobs: Jobs, name: str) -> None:
    found = jobs.report(name)
    measured = [json.loads((jobs.folder / name / f"{rank}.json").read_text()) for rank in range(4)]
    ranks = {rank["rank"]: (rank["host"], rank["pid"], rank["peak_bytes"]) for rank in found["ranks"]}
    assert ranks == {own["rank"]: (own["host"], own["pid"], own["peaks"]["any"]) for own in measured}
    assert [own["host"] for own in measured] == ["host-a", "host-a", "host-b", "host-b"]
    assert (found["job_source"], found["world_size"], found["unrecorded_ranks_count"]) == ("SLURM_JOB_ID", 4, 0)
    assert re.fullmatch(r"\d+\.0", found["job"]) and len(found["runs"]) == 2 * Jobs.TASKS[name]
