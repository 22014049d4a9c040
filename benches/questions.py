#!/usr/bin/env python3
"""lines, diff and check: beside Python's pickle.load of a snapshot with the same events."""

import shutil
import statistics
import subprocess
import sys

import analysis
import frame

SIZES = [100_000, 1_000_000] if frame.QUICK else [100_000, 1_000_000, 10_000_000]
# With more events Python needs gigabytes.
LARGEST_PICKLE = 1_000_000
ROUNDS = 1 if frame.QUICK else 5
LOAD = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"


def rows(events):
    trace = analysis.trace_of(analysis.synthetic(events))
    asked = {
        "report": [frame.MEMTRACE, "report", trace],
        "lines": [frame.MEMTRACE, "lines", trace],
        "diff": [frame.MEMTRACE, "diff", trace, trace],
        "diff --steps": [frame.MEMTRACE, "diff", trace, "--steps", "0", "1"],
        "check": [frame.MEMTRACE, "check", trace, "--max-peak", "1TiB", "--max-leak", "1TiB"],
    }
    if events <= LARGEST_PICKLE:
        snapshot = frame.SCRATCH / "snapshot.pickle"
        subprocess.run([frame.MEMTRACE, "export", "--to", "snapshot", "-o", snapshot, trace], check=True, stderr=subprocess.DEVNULL)
        asked["pickle.load"] = [sys.executable, "-c", LOAD, snapshot]
    found = {name: [] for name in asked}
    for round_ in range(ROUNDS):
        frame.say(f"{events:,} events, round {round_ + 1}")
        for name, command in asked.items():
            found[name].append(analysis.measure(command))
    seconds = {name: statistics.median(one["s"] for one in all_) for name, all_ in found.items()}
    for name, all_ in found.items():
        row = {"table": "Medians; each process measured whole, start included", "what": name, "events": events, "s": seconds[name],
               "CPU_s": statistics.median(one["cpu_s"] for one in all_), "ns_per_event": 1e9 * seconds[name] / events,
               "peak_MiB": max(one["mib"] for one in all_)}
        if "pickle.load" in seconds and name != "pickle.load":
            row |= {"ratio_to": "pickle.load", "ratio": seconds[name] / seconds["pickle.load"]}
        yield row


def main():
    analysis.KEPT.mkdir(parents=True, exist_ok=True)
    found = []
    for events in SIZES:
        found += rows(events)
        if analysis.KEPT == frame.SCRATCH:
            shutil.rmtree(analysis.synthetic(events))
    frame.done("questions", found, about="How long questions about a recording take, and how much memory; `diff` reads it twice. The "
               "recording is synthetic_run's: a loop of a thousand layers.", **frame.conditions())


if __name__ == "__main__":
    main()
