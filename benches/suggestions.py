#!/usr/bin/env python3
"""Suggestions against the truth: the peak that each one announces beside the peak of the program with that change.

Every program of tests/programs/suggestions runs under memtrace. For each suggestion of its report the program runs again,
without memtrace and with the suggested change (`--change RULE`), and prints its peak. Programs that name limits also run
with so little memory that they fail; there the run with the change shows whether it fits.

    suggestions.py [PROGRAM...]    SUGGESTIONS_PROGRAMS="PROGRAM ..." does the same under scripts/bench
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import frame

PROGRAMS = frame.ROOT / "tests" / "programs" / "suggestions"
# The status of a program that cannot make a change.
CANNOT = 3
# The programs of --quick.
FEW = ["decoder", "evaluation", "serve", "wide"]
MIB = 1 << 20


def programs(gpus):
    """The names of the programs for at most `gpus` devices, sorted, each with its memory limits in bytes."""
    found = {}
    for path in sorted(PROGRAMS.glob("*.py")):
        text = path.read_text()
        needed = re.search(r"^# GPUs: (\d+)$", text, re.MULTILINE)
        if "CHANGES = changes.parse(" in text and int(needed[1] if needed else 1) <= gpus:
            limits = re.search(r"^# limits: (.*)$", text, re.MULTILINE)
            found[path.stem] = [int(limit.removesuffix("M")) * MIB for limit in limits[1].split()] if limits else []
    return found


@functools.cache
def packages(name):
    """The folder with the packages that a program names, for PYTHONPATH.

    None if it names none, or if this Python has them. With --gpu any version will do: a machine with a GPU may have no network.
    """
    needed = re.search(r"^# packages: (.*)$", (PROGRAMS / f"{name}.py").read_text(), re.MULTILINE)
    needed = needed[1].split() if needed else []
    if not needed or frame.GPU and importlib.util.find_spec(needed[0].partition("==")[0]):
        return None
    return subprocess.run([frame.ROOT / "scripts" / "packages", *needed], capture_output=True, text=True, check=True).stdout.strip()


def run(name, *arguments, limit=None, prefix=()):
    """Runs a program, optionally with `limit` bytes of device memory. Returns the finished process."""
    # Two simulated devices are there for the programs of two ranks.
    env = dict(os.environ, SIMCUDA_DEVICES="2", OMP_NUM_THREADS="1")
    if packages(name):
        env["PYTHONPATH"] = packages(name)
    if limit and frame.GPU:
        arguments = (*arguments, "--limit", str(limit))
    elif limit:
        env["SIMCUDA_MEMORY"] = str(limit)
    command = [*prefix, sys.executable, PROGRAMS / f"{name}.py", *arguments]
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=False)


def ran_out_of_memory(done):
    return done.returncode != 0 and "OutOfMemoryError" in done.stderr


def printed_peak(done):
    return int(done.stdout.split()[-1])


def record(name, limit):
    """Records a program. Returns the finished process and the summary of the device that its suggestions are about."""
    folder = frame.SCRATCH / f"run-{name}-{limit}"
    done = run(name, limit=limit, prefix=[frame.MEMTRACE, "-o", folder, "--quiet", "--no-snapshot", "--"])
    if done.returncode != 0 and not (limit and ran_out_of_memory(done)):
        raise RuntimeError(f"{name} failed: {done.stderr}")
    summary = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder)
    with_devices = [process for process in summary["processes"] if process["devices"]]
    # Rank 0 prints its peak.
    process = next((process for process in with_devices if process.get("rank") == 0), with_devices[0])
    return done, process["devices"][0]


def change(suggestion):
    """The arguments with which a program makes the change."""
    rules = suggestion.get("combines") or [suggestion["rule"]]
    return [argument for rule in rules for argument in ("--change", rule)] + ["--action", suggestion["action"]]


def announced_peak(suggestion, peak):
    if "peak_after_bytes" in suggestion:
        return suggestion["peak_after_bytes"]
    return peak - suggestion["saves_bytes"] if peak else None


def measure(name, limit):
    """The rows of the suggestions of the program's report."""
    rows = []
    done, device = record(name, limit)
    if limit and done.returncode == 0:
        raise RuntimeError(f"{name} fits into {limit} bytes")
    peak = None if limit else printed_peak(done)
    if peak and peak != device["highest"]["allocated_bytes"]:
        raise RuntimeError(f"{name}: the report has the peak {device['highest']['allocated_bytes']}, PyTorch has {peak}")
    for suggestion in device["suggestions"]:
        changed = run(name, *change(suggestion), limit=limit)
        row = {"program": name, "limit": limit, "suggestion": suggestion["action"], "peak": peak, "announced": announced_peak(suggestion, peak)}
        if changed.returncode == CANNOT:
            row["cannot"] = changed.stderr.strip().splitlines()[-1].removeprefix("cannot: ")
        elif changed.returncode != 0 and not (limit and ran_out_of_memory(changed)):
            raise RuntimeError(f"{name} {change(suggestion)} failed: {changed.stderr}")
        else:
            row["measured"] = printed_peak(changed) if changed.returncode == 0 else None
            row["announced fit"], row["fit"] = suggestion.get("fits"), changed.returncode == 0
        rows.append(row)
        frame.say(f"{name}{f' with {limit // MIB} MiB' if limit else ''}: {json.dumps(row)}")
    return rows


def error(row):
    """The error of the announced peak, in percent of the measured one."""
    return 100 * abs(row["announced"] - row["measured"]) / row["measured"]


def mebibytes(size):
    return None if size is None else size / MIB


def yes(value):
    return {True: "yes", False: "no", None: "unknown"}[value]


def rows_of(found):
    """The rows of the tables."""
    # For a program that fails, the announced peak is that of its recorded part.
    with_peaks = [row for row in found if row.get("measured") and row["announced"] is not None and not row["limit"]]
    errors = [error(row) for row in with_peaks]
    useless = [row for row in with_peaks if row["measured"] >= row["peak"]]
    with_fits = [row for row in found if row.get("announced fit") is not None and row["limit"]]
    rows = [{
        "table": "All programs",
        "programs": len({row["program"] for row in found}),
        "suggestions": len(found),
        "with_a_measured_peak": len(with_peaks),
        "median_error_percent": statistics.median(errors) if errors else None,
        "maximum_error_percent": max(errors, default=None),
        "that_do_not_lower_the_peak": len(useless),
        "fits_announced_right": f"{sum(row['announced fit'] == row['fit'] for row in with_fits)} of {len(with_fits)}",
        "the_program_cannot_do_it": sum("cannot" in row for row in found),
    }]
    for row in found:
        if "cannot" in row:
            rows.append({"table": "Changes that a program cannot make", "program": row["program"], "suggestion": row["suggestion"], "reason": row["cannot"]})
        elif row["limit"]:
            rows.append({"table": "Programs that fail with little memory", "program": row["program"], "memory_MiB": row["limit"] // MIB,
                         "suggestion": row["suggestion"], "measured_peak_MiB": mebibytes(row["measured"]), "announced_to_fit": yes(row["announced fit"]), "fits": yes(row["fit"])})
        else:
            rows.append({"table": "Peaks", "program": row["program"], "suggestion": row["suggestion"], "peak_MiB": mebibytes(row["peak"]),
                         "announced_peak_MiB": mebibytes(row["announced"]), "measured_peak_MiB": mebibytes(row["measured"]),
                         "error_percent": error(row) if row in with_peaks else None})
    return rows


def main():
    chosen = sys.argv[1:] or os.environ.get("SUGGESTIONS_PROGRAMS", "").split() or (FEW if frame.QUICK else [])
    import torch

    gpus = torch.cuda.device_count() if frame.GPU else 2
    runs = [(name, limit) for name, limits in programs(gpus).items() if not chosen or name in chosen for limit in [None, *limits]]
    failed = []

    def measured(run):
        try:
            return measure(*run)
        except RuntimeError as error:
            failed.append(run)
            frame.say(f"error: {error}")
            return []

    # No figure is a time, so the programs can run beside each other.
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        found = [row for rows in pool.map(measured, runs) for row in rows]

    frame.done("suggestions", rows_of(found), about="The peak that a suggestion announces, and the peak of the same program with that change. The error is the "
               "difference in percent of the measured peak.", **frame.conditions(torch))
    if failed:
        sys.exit(f"error: {len(failed)} programs failed: {' '.join(sorted({name for name, _ in failed}))}")


if __name__ == "__main__":
    main()
