#!/usr/bin/env python3
"""Time of a dry run: GPT-2 with 3 steps, beside `import torch` and the program's own time over the simulated CUDA."""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time

import frame
import torch

CHILD = frame.HERE / "dry_run_speed_child.py"
ROUNDS = 1 if frame.QUICK else 5
# GPT-2 fits.
GPU = "a100-80gb"


def measure(*command):
    """The seconds and the CPU seconds of a command and its children."""
    env = dict(os.environ)
    # Python compiles the files of PyTorch only once.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["SIMCUDA_MEMORY"] = "80G"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(list(map(str, command)), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - start
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def dry_run():
    folder = frame.SCRATCH / "run"
    shutil.rmtree(folder, ignore_errors=True)
    return measure(frame.MEMTRACE, "dry-run", "--gpu", GPU, "-o", folder, "--", sys.executable, CHILD)


def main():
    cases = {
        "import torch": lambda: measure(sys.executable, "-c", "import torch"),
        "GPT-2, without memtrace": lambda: measure(sys.executable, CHILD),
        "GPT-2, dry run with its reports": dry_run,
    }
    samples = {name: [] for name in cases}
    for number in range(ROUNDS + 1):
        for name, case in cases.items():
            frame.say(f"round {number} of {ROUNDS}: {name}")
            sample = case()
            # The first round fills caches.
            if number > 0 or frame.QUICK:
                samples[name].append(sample)
    base = [statistics.median(column) for column in zip(*samples["import torch"], strict=True)]
    rows = []
    for name, measured in samples.items():
        seconds, cpu_seconds = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append({"table": "Time of a dry run", "program": name, "s": seconds, "CPU_s": cpu_seconds, "ratio_to": "import torch",
                     "ratio": seconds / base[0], "CPU_ratio": cpu_seconds / base[1]})
    frame.done("dry-run-speed", rows, about="Three steps of GPT-2 (124 M parameters, batch 8 x 1024, bf16 autocast, AdamW), from the start of the command to its end. "
               f"Medians of {ROUNDS} rounds in alternation.", **frame.conditions(torch))


if __name__ == "__main__":
    main()
