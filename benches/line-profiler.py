#!/usr/bin/env python3
"""The cost of the line profiler of gpu_memtrace: a profiled function beside the same function under pytorch_memlab's."""

import json
import os
import statistics
import subprocess

import frame
import under

# The peer of tests/tests/reports/lines.rs, in the same versions.
PEER = ["pytorch_memlab==0.3.2", "pandas==2.2.3", "calmsize==0.1.3", "python-dateutil==2.9.0.post0", "pytz==2025.2", "six==1.17.0",
        "tzdata==2025.2"]
MEMLAB = "pytorch_memlab"


def packages():
    """The folder with the peer, for PYTHONPATH."""
    return subprocess.run([frame.ROOT / "scripts" / "packages", *PEER], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def times_as_long(samples, kind, to):
    """The time of `kind` divided by that of `to`, side by side in each round."""
    found = [one / other for one, other in zip(samples[kind], samples[to])]
    return statistics.median(found), frame.bootstrap(found)


def row(found):
    samples, lines = found["samples"], found["lines"]
    ours, ours_95 = times_as_long(samples, "memtrace", "off")
    theirs, theirs_95 = times_as_long(samples, MEMLAB, "off")
    ratio, ratio_95 = times_as_long(samples, "memtrace", MEMLAB)
    off, with_ours, with_theirs = (statistics.median(samples[kind]) for kind in ("off", "memtrace", MEMLAB))
    return {
        "table": "One pass of the loop in the profiled function",
        "function": found["function"],
        "lines": lines,
        "allocations": found["allocations"],
        "unprofiled_us": off * 1e6,
        "memtrace_us": with_ours * 1e6,
        "memtrace_times_as_long": ours,
        "memtrace_95%": ours_95,
        f"{MEMLAB}_us": with_theirs * 1e6,
        f"{MEMLAB}_times_as_long": theirs,
        f"{MEMLAB}_95%": theirs_95,
        "ratio_to": MEMLAB,
        "ratio": ratio,
        "ratio_95%": ratio_95,
    }


def main():
    import torch

    environment = {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(frame.ROOT / "launcher/python"), packages()])}
    rows, tables = [], []
    for name in ("python", "operations", "training"):
        found = under.memtrace(f"lines-{name}", "line_profiler_child.py", name, env=environment)
        lost = under.losses(f"lines-{name}").get("lost", 0)
        rows.append(row(found))
        tables.append({"table": "Making the table after a number of passes", "function": found["function"], "passes": found["table_passes"],
                       "memtrace_s": found["table_s"]["memtrace"], f"{MEMLAB}_s": found["table_s"][MEMLAB], "ratio_to": MEMLAB,
                       "ratio": found["table_s"]["memtrace"] / found["table_s"][MEMLAB]})
        frame.say(f"{name}: {json.dumps(rows[-1])}, {lost} events lost")
    frame.done(
        "line-profiler", rows + tables,
        "Three processes take turns, block by block: an unprofiled one, which nothing records, one that memtrace records, with the function in its `LineProfiler`, "
        "and one with the function in pytorch_memlab's `LineProfiler`, which nothing records. `lines` and `allocations`: of one pass of the loop in that function. "
        "`times as long`: a round's blocks side by side, the median of rounds with its 95 % interval. The driver of the simulated CUDA "
        "costs nothing, and neither do kernels: on a GPU that is busy all the time both profilers may hide behind it. What memtrace does later, "
        "reading the recording for the table, is the second table.",
        **frame.conditions(torch))


main()
