#!/usr/bin/env python3
"""What names of tensors and modules cost: a step with them and with --no-names, and the first look's pause."""

import statistics

import frame
import turns
import under

LAYERS = {"MLP of 75 layers, width 64, Adam: 150 parameters": "75", "MLP of 1500 layers, width 16, Adam: 3000 parameters": "1500"}
KINDS = ["memtrace", "memtrace-no-names"]


def row(about, found, looks):
    first = {kind: [sum(one["first_s"]) for one in found["fresh"][kind]] for kind in KINDS}
    paused = [(named - plain) * 1000 for named, plain in zip(*(first[kind] for kind in KINDS))]
    # Each sample of a process beside the other process's of the same round.
    ratios = [plain / named
              for pair in zip(*(found["fresh"][kind] for kind in KINDS))
              for named, plain in zip(*(one["step_s"] for one in pair))]
    return {
        "model": about,
        "steps_a_block": found["steps"],
        "blocks": len(ratios),
        "step_ms": statistics.median(s for one in found["fresh"]["memtrace-no-names"] for s in one["step_s"]) * 1000,
        "ratio_to": "--no-names",
        "ratio": statistics.median(ratios),
        "ratio_95%": frame.bootstrap(ratios),
        "processes": len(paused),
        "first_steps_longer_ms": statistics.median(paused),
        "first_steps_longer_ms_range": [min(paused), max(paused)],
        "looks_ms": statistics.median(looks),
        "looks_ms_range": [min(looks), max(looks)],
        "process_s": statistics.median(one["whole_s"] for one in found["fresh"]["memtrace"]),
    }


def main():
    import torch

    rows = []
    for about, layers in LAYERS.items():
        found = under.memtrace(f"names-{layers}", "names_child.py", layers)
        looks = [us / 1000 for us in under.counted(f"names-{layers}", "names_us") if us]
        rows.append({"table": "Steps a second with names, as a share of those without", **row(about, found, looks)})
        frame.say(f"names: {about}: {rows[-1]['ratio']:.4f} of the steps a second, first steps {rows[-1]['first_steps_longer_ms']:.1f} ms longer")
    frame.done(
        "names", rows,
        "Pairs of fresh processes, one with names and one with --no-names, both recorded, taking turns block by block. `first steps longer`: by how "
        "much the first three steps of the one took longer than those of the other, all that is looked at for the first time included; `looks`: how "
        "long a process was held up by looks for names, all together (`names_us` of run.json), of the `process_s` between its first step and its "
        "end. What the ratio has beside that is the paths of modules being called, which --no-names leaves out too.",
        **frame.conditions(torch))


main()
