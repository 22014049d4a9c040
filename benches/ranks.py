#!/usr/bin/env python3
"""memtrace report DIR of a job with 1,024 ranks and a million events each, from their run folders.

The data set is compact: 8 different traces, and for each rank a run folder with links to one of them and a manifest and a
summary of its own. So the files that the report reads for the table are distinct, and the traces share the disk.
"""

import json
import os
import shutil
import statistics
import subprocess

import analysis
import frame

RANKS = [64] if frame.QUICK else [64, 1024]
EVENTS = 10_000 if frame.QUICK else 1_000_000
TRACES = 8
RANKS_PER_HOST = 8
ROUNDS = 1 if frame.QUICK else 5
TABLE = "The table of ranks and phases of one job; memory is the sum of the peaks of memtrace's processes"


def sources():
    """Records TRACES made-up processes, and summarizes each as its own launcher would."""
    found = []
    for seed in range(1, TRACES + 1):
        folder = analysis.synthetic(EVENTS, str(seed))
        summary = folder / "summary.json"
        if not summary.exists():
            subprocess.run([frame.MEMTRACE, "export", folder, "--to", "json", "-o", summary], check=True, stderr=subprocess.DEVNULL)
        found.append((analysis.trace_of(folder), json.loads(summary.read_text())))
    return found


def generate(folder, ranks, found):
    """Writes the run folders of one job. The clock of each host is a little off, as NTP leaves it."""
    for rank in range(ranks):
        trace, summary = found[rank % len(found)]
        host = f"node{rank // RANKS_PER_HOST}"
        run = folder / f"memtrace-train-20261124-110000-{host}-{rank}"
        run.mkdir(parents=True)
        os.link(trace, run / trace.name)
        process = summary["processes"][0]
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_HOST), "WORLD_SIZE": str(ranks), "SLURM_JOB_ID": "4711",
               "SLURM_STEP_ID": "0"}
        started = 1_790_000_000_000_000_000 + 1_000_000 * (rank // RANKS_PER_HOST % 7)
        manifest = {"version": 2, "memtrace": "0.1.0", "command": ["python", "train.py"], "host": host, "state": "ended",
                    "started_ns": started, "ended_ns": started + 600 * 10**9, "pid": process["pid"], "exit": {"code": 0},
                    "processes": [{"pid": process["pid"], "trace": trace.name, "argv": ["python", "train.py"], "env": env, "exit": {"code": 0},
                                   "rank": rank, "world_size": ranks}]}
        (run / "run.json").write_text(json.dumps(manifest))
        process |= {"rank": rank, "world_size": ranks, "host": host}
        summary["run"] |= {"memtrace_version": "0.1.0", "started_ns": started}
        (run / "summary.json").write_text(json.dumps(summary, indent=2))


def rows_of(folder, ranks):
    size = sum(path.stat().st_size for path in folder.glob("*/summary.json"))
    traces = sorted(folder.glob("*-[01]/*.mtr"))
    # All ranks of the job have nearly the same peak, so the report compares no two of them; `diff` is what it would do.
    commands = {"report of the job, from run folders": ["report", folder], "the same as JSON": ["report", folder, "--json"],
                "diff of two of its traces": ["diff", *traces]}
    for name, arguments in commands.items():
        measured = []
        for round_ in range(ROUNDS):
            frame.say(f"{ranks:,} ranks, round {round_ + 1}: {name}")
            measured.append(analysis.measure([frame.MEMTRACE, *arguments]))
        yield {"table": TABLE, "what": name, "ranks": ranks, "events": ranks * EVENTS, "s": statistics.median(one["s"] for one in measured),
               "cpu_s": statistics.median(one["cpu_s"] for one in measured), "peak_MiB": max(one["mib"] for one in measured),
               "read_MB": size / 1e6}


def main():
    analysis.KEPT.mkdir(parents=True, exist_ok=True)
    rows, found = [], sources()
    for ranks in RANKS:
        folder = analysis.KEPT / f"ranks-{ranks}"
        shutil.rmtree(folder, ignore_errors=True)
        frame.say(f"writing {ranks:,} runs")
        generate(folder, ranks, found)
        rows += rows_of(folder, ranks)
        shutil.rmtree(folder)
    frame.done("ranks", rows, "A made-up job (synthetic_run): 8 ranks on each host, each rank with a run folder of its own.", **frame.conditions())


if __name__ == "__main__":
    main()
