#!/usr/bin/env python3
"""The cost of names of tensors and modules: a step with them and with --no-names, and the pause of the first scan."""

import os
import statistics

import frame
import under

LAYERS = {"MLP of 75 layers, width 64, Adam: 150 parameters": "75", "MLP of 1500 layers, width 16, Adam: 3000 parameters": "1500"}
NAMED, PLAIN, AGAIN = "memtrace", "memtrace-no-names", "again-memtrace-no-names"


def ratios(fresh, kind, to):
    """For each round of processes, the steps a second of `kind` divided by those of `to`: the median over adjacent
    blocks."""
    return [statistics.median(theirs / ours for ours, theirs in zip(one["step_s"], other["step_s"]))
            for one, other in zip(fresh[kind], fresh[to])]


def row(about, found, scans):
    fresh = found["fresh"]
    first = {kind: [sum(one["first_s"]) for one in fresh[kind]] for kind in fresh}
    paused = [(named - plain) * 1000 for named, plain in zip(first[NAMED], first[PLAIN])]
    named, control = ratios(fresh, NAMED, PLAIN), ratios(fresh, AGAIN, PLAIN)
    return {
        "model": about,
        "steps_a_block": found["steps"],
        "processes": len(paused),
        "step_ms": statistics.median(s for one in fresh[PLAIN] for s in one["step_s"]) * 1000,
        "ratio_to": "--no-names",
        "ratio": statistics.median(named),
        "ratio_95%": frame.bootstrap(named),
        "control": statistics.median(control),
        "control_95%": frame.bootstrap(control),
        "first_steps_longer_ms": statistics.median(paused),
        "first_steps_longer_ms_range": [min(paused), max(paused)],
        "scans_ms": statistics.median(scans),
        "scans_ms_range": [min(scans), max(scans)],
        "process_s": statistics.median(one["whole_s"] for one in fresh[NAMED]),
    }


def main():
    import torch

    rows = []
    # BENCH_LAYERS selects one of the two to save time.
    asked = os.environ.get("BENCH_LAYERS")
    for about, layers in ((about, layers) for about, layers in LAYERS.items() if asked in (None, layers)):
        found = under.memtrace(f"names-{layers}", "names_child.py", layers)
        scans = [us / 1000 for us in under.counted(f"names-{layers}", "names_us") if us]
        rows.append({"table": "Steps a second with names, as a share of those without", **row(about, found, scans)})
        frame.say(f"names: {rows[-1]}")
    frame.done(
        "names", rows,
        "Rounds of three fresh processes, all recorded: one with names and two with --no-names, taking turns block by block. `ratio`: steps a second "
        "with names for one without, a round's blocks side by side, the median of rounds, since processes that do the same differ, too: "
        "`control` is the same of the two without. `first steps longer`: by how much the first three steps with names took longer than "
        "those without, including the first scans; `scans`: how long scans for names paused a process, all together "
        "(`names_us` of run.json), of the `process_s` between its first step and its end, the others' turns included. What the ratio has beside that "
        "is the paths of modules being called, which --no-names leaves out too.",
        **frame.conditions(torch))


main()
