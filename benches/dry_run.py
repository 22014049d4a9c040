#!/usr/bin/env python3
"""Dry runs against the truth: peaks without a GPU beside those of a GPU, and beside MemTracker and accelerate's estimate.

tests/programs/dry_run has the programs, and programs.toml what is known of them. With --gpu the programs run on this
machine's GPUs, some of them again with 70 % of the memory that they reserved. Without it they run in dry runs, and the
tables compare them with the figures of a GPU in docs/dev/dry-run/*/dry-run.json (`scripts/bench --gpu -o docs/dev/dry-run/h200 dry-run`).

    DRY_RUN_PROGRAMS="PROGRAM ..."   only these
    DRY_RUN_REAL=FILE...             other figures of a GPU; of a program that is in several files, the last counts
    DRY_RUN="memtrace dry-run --gpu h200 --gpus {gpus} --"   the command of a dry run. Without it the programs run over the simulated CUDA
    DRY_RUN_LIMITED="memtrace dry-run --memory {memory} --"  the same for devices of so many bytes
    DRY_RUN_ALONE=1                  without MemTracker and accelerate
"""

import contextlib
import functools
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor

import frame

PROGRAMS = frame.ROOT / "tests" / "programs" / "dry_run"
CHILD = frame.HERE / "dry_run_child.py"
REAL = sorted((frame.ROOT / "docs" / "dev" / "dry-run").glob("*/dry-run.json"))
# The programs of --quick.
FEW = ["point_cloud", "ppo"]
# A program that does not end is stopped after this time.
SECONDS = 300
# The share of the reserved memory with which a program runs out of memory.
LIMIT = 0.7
MIB = 1 << 20
# The largest error of the goal, in percent, without and with functions of cuDNN.
GOAL = {False: 1, True: 3}


@functools.cache
def packages():
    """The folder with the packages that the programs need, for PYTHONPATH; None with --gpu: a machine with a GPU may have no network."""
    if frame.GPU:
        return None
    needed = (PROGRAMS / "requirements.txt").read_text().split()
    return subprocess.run([frame.ROOT / "scripts" / "packages", *needed], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run(name, about, *options, gpu=None, memory=None, prefix=()):
    """Runs a program in a folder of its own. Returns the results of its ranks and the seconds that all of it took."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=frame.SCRATCH))
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), TRITON_CACHE_DIR=str(folder / "triton"), HF_HUB_OFFLINE="1")
    # Python compiles the files of large libraries only once.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # The names of this folder's files are no modules of the programs.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(frame.HERE)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [packages(), *paths]))
    env["PATH"] = os.pathsep.join([os.path.dirname(frame.MEMTRACE), env["PATH"]])
    gpus = about.get("gpus", 1)
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if not frame.GPU:
        env["OMP_NUM_THREADS"] = "1"
    if not frame.GPU and not prefix:
        env |= {"SIMCUDA_DEVICES": str(gpus), "SIMCUDA_MEMORY": str(memory)}
        # Triton reads the name of the GPU from the driver.
        env["TRITON_LIBCUDA_PATH"] = os.environ.get("SIMCUDA_LIB", "")
    python = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus] if gpus > 1 else [sys.executable]
    words = [*prefix, *python, CHILD, "--result", folder / "%r.json", *options, PROGRAMS / f"{name}.py"]
    start = time.monotonic()
    with open(folder / "stderr", "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(list(map(str, words)), env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
    try:
        status = process.wait(SECONDS)
        lost = ((folder / "stderr").read_text(errors="replace").strip().splitlines() or [f"status {status}"])[-1]
    except subprocess.TimeoutExpired:
        # The ranks of a program have sessions of their own. torchrun ends them.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(45)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        lost = f"stopped after {SECONDS} s"
    seconds = time.monotonic() - start
    ranks = []
    for rank in range(gpus):
        file = folder / f"{rank}.json"
        ranks.append(json.loads(file.read_text()) if file.exists() else {"devices": [], "failure": {"type": "no result", "message": lost, "line": None}})
    shutil.rmtree(folder, ignore_errors=True)
    frame.say(f"{name} {' '.join(options)}: {seconds:.1f} s, " + "; ".join(described(rank) for rank in ranks))
    for result in ranks:
        # The results are kept in the repository. Paths of this machine are of no use there.
        trace = result.get("failure", {}).pop("traceback", "")
        if trace and "OutOfMemoryError" not in trace:
            frame.say(trace[-1500:])
    return ranks, seconds


def described(result):
    peaks = ", ".join(f"{device['allocated'] / MIB:,.0f} MiB" for device in result["devices"]) or "no peak"
    return peaks + (f", {reason(result)}" if "failure" in result else "")


def reason(result):
    """Why a program failed, in one line."""
    failure = result["failure"]
    return f"{failure['type']}: {failure['message'].strip().splitlines()[0] if failure['message'].strip() else ''}"[:160]


def label(name, rank, about):
    return f"{name}, rank {rank}" if about.get("gpus", 1) > 1 else name


def limit_of(reserved):
    """A limit in bytes that is no multiple of a segment's size, so that rounding of a fraction does not matter."""
    return int(LIMIT * reserved) // (2 * MIB) * 2 * MIB + MIB


def requested(failure):
    """The size that the failed allocation requested, as in the message."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", failure.get("message", ""))
    return found[1] if found else None


# ---- on a GPU

def measure_real(name, about, gpu):
    ranks, seconds = run(name, about, gpu=gpu)
    rows = []
    for rank, result in enumerate(ranks):
        row = {"table": "Peaks on a GPU", "program": label(name, rank, about), "seconds": seconds, "versions": result.get("versions")}
        if "failure" in result or not result["devices"]:
            row["failure"] = result.get("failure")
        else:
            # The ranks of a program are on devices of their own, so that each result has one device.
            device = result["devices"][-1]
            row |= {key: device[key] for key in ("allocated", "reserved", "outside", "retries", "total")}
        rows.append(row)
    if about.get("limited") and "failure" not in rows[0]:
        limit = limit_of(rows[0]["reserved"])
        (result, ), _ = run(name, about, "--limit", str(limit), gpu=gpu)
        rows.append({"table": "Out of memory on a GPU", "program": name, "limit": limit, "failure": result.get("failure")})
    return rows


def on_gpus(programs):
    import torch

    gpus = torch.cuda.device_count()
    single = [name for name, about in programs.items() if about.get("gpus", 1) == 1]
    # One program at a time on each GPU: what is in use on it outside PyTorch is then the program's.
    free = queue.SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)

    def measured(name):
        gpu = free.get()
        try:
            return measure_real(name, programs[name], gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as pool:
        found = list(pool.map(measured, single))
    found += [measure_real(name, about, None) for name, about in programs.items() if 1 < about.get("gpus", 1) <= gpus]
    skipped = [name for name, about in programs.items() if about.get("gpus", 1) > gpus]
    if skipped:
        frame.say(f"skipped, too few GPUs: {', '.join(skipped)}")
    rows = [row for rows in found for row in rows]
    frame.done("dry-run", rows, about="What PyTorch allocated and reserved at most on a GPU, and what was in use outside PyTorch at the end "
               "(context, kernels, libraries), in bytes.", **frame.conditions(torch))


# ---- in dry runs

def real_figures():
    """The figures of a GPU by table and program."""
    files = os.environ.get("DRY_RUN_REAL", "").split() or REAL
    rows = [row for file in files for row in json.loads(pathlib.Path(file).read_text())["rows"]]
    return {(row["table"], row["program"]): row for row in rows}


def error(measured, real):
    """In percent of the real figure, with its sign."""
    return 100 * (measured - real) / real if measured is not None and real else None


def command(variable, about, memory):
    """The command of a dry run, as words."""
    return [word.replace("{memory}", str(memory)).replace("{gpus}", str(about.get("gpus", 1))) for word in shlex.split(os.environ.get(variable, ""))]


def estimate(result, mode):
    """accelerate's figure for the mode, or None."""
    return result["estimate"]["training" if mode == "training" else "size"] if "estimate" in result else None


def cell(value, result):
    """A figure, or why there is none."""
    return value if value is not None else reason(result) if "failure" in result else None


def compare(name, about, real):
    """The rows of a program."""
    known = real.get(("Peaks on a GPU", label(name, 0, about)), {})
    memory = known.get("total") or 141 << 30
    ranks, seconds = run(name, about, memory=memory, prefix=command("DRY_RUN", about, memory))
    rows = []
    for rank, result in enumerate(ranks):
        row = real.get(("Peaks on a GPU", label(name, rank, about)), {})
        device = result["devices"][-1] if result["devices"] and "failure" not in result else {}
        allocated, reserved = device.get("allocated"), device.get("reserved")
        rows.append({"table": "Peaks", "program": label(name, rank, about), "field": about["field"], "cuDNN": "yes" if about["convolutions"] else "no",
                     "allocated_MiB": mebibytes(row.get("allocated")), "dry_MiB": mebibytes(allocated), "error_percent": error(allocated, row.get("allocated")),
                     "reserved_MiB": mebibytes(row.get("reserved")), "dry_reserved_MiB": mebibytes(reserved),
                     "reserved_error_percent": error(reserved, row.get("reserved")), "seconds": seconds,
                     "failed": reason(result) if "failure" in result else None, "values": about.get("values")})
    first = rows[0]
    if about.get("gpus", 1) == 1 and not os.environ.get("DRY_RUN_ALONE"):
        others = {"table": "Beside other tools", "program": name, "allocated_MiB": first["allocated_MiB"], "dry_run_MiB": first["dry_MiB"],
                  "dry_run_error_percent": first["error_percent"], "dry_run_s": seconds}
        (tracker, ), tracker_seconds = run(name, about, "--tracker", memory=memory)
        peak = tracker["devices"][0]["allocated"] if tracker["devices"] and "failure" not in tracker else None
        others |= {"MemTracker_MiB": cell(mebibytes(peak), tracker), "MemTracker_error_percent": error(peak, known.get("allocated")),
                   "MemTracker_s": tracker_seconds}
        (guess, ), guess_seconds = run(name, about, "--estimate", memory=memory)
        size = estimate(guess, about["mode"])
        others |= {"accelerate_MiB": cell(mebibytes(size), guess), "accelerate_error_percent": error(size, known.get("allocated")), "accelerate_s": guess_seconds}
        rows.append(others)
    expected = real.get(("Out of memory on a GPU", name))
    if about.get("limited") and (expected or first["dry_reserved_MiB"]):
        limit = expected["limit"] if expected else limit_of(first["dry_reserved_MiB"] * MIB)
        (result, ), _ = run(name, about, memory=limit, prefix=command("DRY_RUN_LIMITED", about, limit))
        ours, theirs = result.get("failure") or {}, (expected or {}).get("failure") or {}
        rows.append({"table": "Out of memory", "program": name, "limit_MiB": limit // MIB,
                     "line_on_a_GPU": theirs.get("line"), "requested_on_a_GPU": requested(theirs), "line_in_a_dry_run": ours.get("line"),
                     "requested_in_a_dry_run": requested(ours), "error_in_a_dry_run": ours.get("type", "none"),
                     "same_line": yes(theirs.get("line") == ours.get("line")) if theirs else None,
                     "same_innermost_line": yes(theirs.get("innermost") == ours.get("innermost")) if theirs else None})
    return rows


def yes(value):
    return "yes" if value else "no"


def mebibytes(size):
    return None if size is None else size / MIB


def overview(rows):
    """One row for the programs without and one for those with functions of cuDNN."""
    found = []
    for cudnn in (False, True):
        chosen = [row for row in rows if row["table"] == "Peaks" and row["cuDNN"] == yes(cudnn)]
        row = {"table": "All programs", "cuDNN": yes(cudnn), "programs": len(chosen), "failed_in_a_dry_run": sum(row["failed"] is not None for row in chosen),
               "goal_percent": GOAL[cudnn]}
        for key, title in (("error_percent", "allocated"), ("reserved_error_percent", "reserved")):
            errors = [abs(row[key]) for row in chosen if row[key] is not None]
            row |= {f"{title}_median_error_percent": statistics.median(errors) if errors else None, f"{title}_maximum_error_percent": max(errors, default=None),
                    f"{title}_within_the_goal": f"{sum(error <= GOAL[cudnn] for error in errors)} of {len(errors)}"}
        found.append(row)
    return found


def in_dry_runs(programs):
    import torch

    real = real_figures()
    if not real:
        frame.say("no figures of a GPU: docs/dev/dry-run has none")
    # One after another: the times are compared.
    rows = [row for name, about in programs.items() for row in compare(name, about, real)]
    rows = overview(rows) + sorted(rows, key=lambda row: ["Peaks", "Beside other tools", "Out of memory"].index(row["table"]))
    frame.done("dry-run", rows, about="Peaks in dry runs, without a GPU, beside those of the same programs on a GPU. An error is the difference in percent of the "
               "GPU's figure. `seconds` is the time of the whole process.", **frame.conditions(torch))


def main():
    chosen = sys.argv[1:] or os.environ.get("DRY_RUN_PROGRAMS", "").split() or (FEW if frame.QUICK else [])
    programs = tomllib.loads((PROGRAMS / "programs.toml").read_text())
    if unmatched := programs.keys() ^ {path.stem for path in PROGRAMS.glob("*.py")}:
        sys.exit(f"only in the folder, or only in programs.toml: {', '.join(sorted(unmatched))}")
    if unknown := set(chosen) - programs.keys():
        sys.exit(f"no program {', '.join(sorted(unknown))}")
    programs = {name: about for name, about in programs.items() if not chosen or name in chosen}
    (on_gpus if frame.GPU else in_dry_runs)(programs)


if __name__ == "__main__":
    main()
