#!/usr/bin/env python3
"""Writes the files of run folders that the corpora of `job`, `kept`, `nvml`, `pools` and `xla` started from."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parent
GOLDEN = ROOT.parent / "golden" / "xla"
MIB = 1 << 20
ENDINGS = ["-buffer-assignment.txt", "-live-range.txt", "-memory-usage-report.txt", ".txt"]


def put(target, name, *files):
    folder = ROOT / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\0".join(file.encode() for file in files))


def xla():
    for assignment in GOLDEN.glob(f"*/xla/*{ENDINGS[0]}"):
        program = assignment.name.removesuffix(ENDINGS[0])
        files = [assignment.with_name(program + ending).read_text() for ending in ENDINGS]
        put("xla", program.split(".sm_")[0].split(".cpu_")[0], *files)


def pools():
    jax = {"library": "JAX", "device": 0, "used_bytes": 2 * MIB, "used_peak_bytes": 7 * MIB, "pool_bytes": 100 * MIB}
    cupy = {"library": "CuPy", "device": 0, "allocator": "MemoryPool", "used_bytes": 3, "pool_bytes": 129 << 10}
    whole = {"version": 1, "pools": [jax | {"limit_bytes": 750 * MIB}, cupy | {"limit_bytes": None}], "errors": []}
    put("pools", "both", json.dumps(whole))
    put("pools", "errors", json.dumps({"version": 1, "pools": [cupy], "errors": ["JAX: RuntimeError: no backend"]}))


def nvml():
    def sample(time_ns, used, **processes):
        listed = [{"pid": int(pid[1:]), "bytes": size} for pid, size in processes.items()]
        listed = [{name: value for name, value in one.items() if value is not None} for one in listed]
        return {"kind": "sample", "time_ns": time_ns, "device": 1, "used_bytes": used, "processes": listed}

    device = {"index": 1, "pci": "00000000:17:00.0", "name": "H100", "total_bytes": 1000 * MIB}
    start = [
        {"kind": "start", "version": 1, "driver": "580.95.05", "time_ns": 999_000_000},
        {"kind": "device", **device, "reserved_bytes": MIB},
        {"kind": "process", "pid": 4242, "name": "vllm"},
        sample(999_000_000, 108 * MIB, p4242=100 * MIB),
    ]
    later = {"steady": sample(1_006_000_000, 500 * MIB, p4242=100 * MIB, p7=390 * MIB)}
    later["changing"] = sample(1_006_000_000, 550 * MIB, p4242=150 * MIB, p7=390 * MIB)
    later["container"] = sample(1_006_000_000, 500 * MIB, p4242=None, p19=None)
    end = {"kind": "end", "time_ns": 1_020_000_000, "samples": 2, "left_out": 0}
    for name, last in later.items():
        put("nvml", name, "".join(json.dumps(line) + "\n" for line in [*start, last, end]))


def job():
    def run(rank, host, variables, **process):
        peak = (rank + 1) * 100 * MIB
        env = {"RANK": str(rank), "MASTER_ADDR": "node0", "MASTER_PORT": "29500", **variables}
        times = {"started_ns": 1000 + rank, "ended_ns": 2000}
        manifest = {"memtrace": "0.1.0", "host": host, "state": "ended", "exit": {"code": 0}, **times}
        manifest["processes"] = [{"pid": 7, "env": env, "trace": "7.mtr"}]
        phases = [{"phase": "load", "peak_bytes": peak // 4}, {"phase": "forward", "peak_bytes": peak}]
        device = {"device": 0, "total_bytes": 1000 * MIB, "oom_count": 0, "first_step": phases, "later_steps": phases}
        device["highest"] = {"allocated_bytes": peak, "reserved_bytes": peak + MIB}
        device["by_step"] = [{"step": step, "time_ns": 1000 + 100 * step + 450 * rank} for step in range(3)]
        of_rank = {"pid": 7, "rank": rank, "world_size": 4, "host": host, "exit": {"code": 0}, "trace": "7.mtr"}
        of_rank |= {"snapshot": f"rank{rank}.pickle", "events": 11, "losses": {}, "devices": [device], **process}
        described = {"started_ns": 1000 + rank, "memtrace_version": "0.1.0"}
        return json.dumps(manifest), json.dumps({"version": "2.3", "run": described, "processes": [of_rank]})

    slurm = {"SLURM_JOB_ID": "71"}
    put("job", "slurm", *run(0, "node0", slurm), *run(1, "node1", slurm), *run(3, "node1", slurm))
    killed = {"exit": {"signal": 9}, "losses": {"lost": 3}}
    put("job", "torchrun", *run(0, "node0", {"TORCHELASTIC_RUN_ID": "a"}), *run(0, "node1", {}, **killed), "{}", "")
    # Two runs without a summary: they are read from their traces.
    put("job", "traces", *run(0, "a", slurm)[:1], "", *run(1, "b", slurm)[:1], "", *run(2, "c", slurm))


def kept():
    def state(first_seq, step, *blocks):
        last = first_seq - 1
        rotation = {"first_seq": first_seq, "dropped": last, "recreating": 2, "dropped_ticks": [1, last]}
        position = {"step": step, "phase": "forward", "phase_changes": 9, "backward_passes": 3, "optimizer_steps": 3}
        bits = ["model_ran", "step_is_over", "optimizer_has_stepped", "awaits_loader", "optimizer_is_running"]
        progress = {"position": position, "ended_steps": 3, "main_thread": 1, "has_profiler_ranges": step == 3}
        progress |= {bit: True for bit in bits} | {"backward_passes_in_step": 1, "optimizer_steps": 3}
        progress["backward_passes_of_first_step"] = step and 1
        state = {"rotation": rotation, "is_partial": step is None, "progress": progress, "blocks": blocks}
        return json.dumps(state) + "\n"

    parameter = [2, None, "load", 0, 0, 0, "load", ["parameter", "parameter-module-moved"]]
    put("kept", "two-states", state(9, 3, parameter, [5, 2, "forward", 7, 2, 2, "backward", None]) + state(6, 2))
    put("kept", "partial", state(9, None, parameter))
    put("kept", "huge-step", state(9, (1 << 32) - 1, [2, (1 << 32) - 1, "data", *[(1 << 32) - 1] * 3, "data", None]))
    put("kept", "of-another-trace", state(8, 1))


for seeds in (xla, pools, nvml, job, kept):
    seeds()
