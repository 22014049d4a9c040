"""Ray under memtrace, as the page about many hosts has it: programs with actors and tasks, and Ray Train on two hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Dict

import pytest
from conftest import PROGRAMS, ROOT, memtrace, report, run

# The exit status of `hosts.sh` where the machine does not permit namespaces.
SKIPPED = 77


def test_actors_and_tasks_of_one_program(folder: Path, environment: Dict[str, str]) -> None:
    runs = folder / "actors"
    output = run(memtrace(), "--job", "gpt", "--runs", runs, "--", "python", PROGRAMS / "actors.py", environment=environment, SIMCUDA_DEVICES="3")
    measured = json.loads(output.splitlines()[0])
    found = report(runs)
    assert (found["job"], found["world_size"], found["unrecorded_ranks_count"]) == ("gpt", 2, 0)
    ranks = {rank["rank"]: (rank["pid"], rank["peak_bytes"]) for rank in found["ranks"]}
    assert ranks == {own["rank"]: (own["pid"], own["peak"]) for own in measured if own["rank"] is not None}
    # The task belongs to no group.
    (task,) = [own for own in measured if own["rank"] is None]
    (path,) = runs.iterdir()
    processes = {process["pid"]: process for process in json.loads((path / "summary.json").read_text())["processes"]}
    assert processes[task["pid"]].get("rank") is None
    assert [device["peak"]["totals"]["allocated_bytes"] for device in processes[task["pid"]]["devices"]] == [task["peak"]]


def test_ray_train_on_two_hosts(folder: Path, environment: Dict[str, str]) -> None:
    own = folder / "train"
    own.mkdir()
    # Nothing of a host outlives its first process, because each host has process numbers of its own.
    command = [ROOT / "tests/programs/distributed/hosts.sh", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", PROGRAMS / "ray_node.sh"]
    words = [str(word) for word in [*command, "{host}", memtrace(), own]]
    done = subprocess.run(words, env={**environment, "SIMCUDA_DEVICES": "1"}, capture_output=True, text=True, timeout=500)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = [json.loads((own / f"{rank}.json").read_text()) for rank in range(2)]
    assert {each["host"] for each in measured} == {"host-a", "host-b"}
    found = report(own / "runs")
    assert (found["job"], found["job_source"], found["world_size"], found["unrecorded_ranks_count"]) == ("gpt", "--job", 2, 0)
    # Each launcher has written its report.
    assert [run["origin"] for run in found["runs"]] == ["summary", "summary"]
    ranks = {rank["rank"]: (rank["host"], rank["pid"], rank["peak_bytes"]) for rank in found["ranks"]}
    assert ranks == {each["rank"]: (each["host"], each["pid"], each["peak"]) for each in measured}
