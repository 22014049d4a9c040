#!/usr/bin/env python3
"""How much longer a training step takes while it is recorded: ResNet-50, GPT-2, an eager loop."""

import statistics

import frame
import models
import turns
import under

MODELS = ["eager", "resnet50-1", "resnet50-32", "gpt2"]


def slower(samples, kind):
    """By how many percent each round's block took longer than the same round's block without recording."""
    return [(with_it / off - 1) * 100 for with_it, off in zip(samples[kind], samples["off"])]


def row(model, found):
    samples = found["samples"]
    one = {"model": models.NAMES[model], "steps_a_block": found["steps"], "rounds": len(samples["off"]),
           "step_ms": statistics.median(samples["off"]) * 1000}
    for kind, name in (("memtrace", "memtrace"), ("python", "stacks=python"), ("all", "stacks=all")):
        percent = slower(samples, kind)
        one[f"{name}_%"] = statistics.median(percent)
        one[f"{name}_95%"] = frame.bootstrap(percent)
    peer = one["stacks=python_%"]
    one["ratio_to"] = "stacks=python"
    one["ratio"] = one["memtrace_%"] / peer if peer > 0 else None
    return one


def main():
    import torch

    rows = []
    for method in turns.METHODS:
        for model in MODELS:
            found = under.memtrace(f"{method}-{model}", "training_child.py", method, model)
            rows.append({"table": f"Slow-down of a training step in %, {turns.METHODS[method].about}", **row(model, found)})
            lost = under.losses(f"{method}-{model}")["lost"]
            if lost:
                raise SystemExit(f"{lost} events were lost")
            frame.say(f"training, {turns.METHODS[method].about}: {models.NAMES[model]}, memtrace {rows[-1]['memtrace_%']:.2f} %")
    frame.done("training", rows, "Medians of rounds, each with one block of every kind in turn and a CUDA synchronisation at the end of a "
               "block; the interval is the bootstrap's of the median.", **frame.conditions(torch))


main()
