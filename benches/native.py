#!/usr/bin/env python3
"""The cost of native stacks for one torch.empty + free, beside PyTorch's stacks="all"."""

import statistics
import subprocess

import compare
import frame
import under

KINDS = ["off", "memtrace", "memtrace-both", "memtrace-native", "all"]


def row(found):
    samples = found["samples"]
    adds = {kind: compare.added(samples, kind) for kind in KINDS[1:]}
    pairs = list(zip(adds["memtrace-both"], adds["all"]))
    return {
        "table": "ns for one torch.empty(1000, device=\"cuda\") and its free, processes taking turns",
        "threads": found["threads"], "depth": found["depth"], "rounds": len(samples["off"]),
        "nothing_recorded_ns": statistics.median(samples["off"]),
        "--stacks_python_adds_ns": statistics.median(adds["memtrace"]),
        "--stacks_both_adds_ns": statistics.median(adds["memtrace-both"]), "both_quartiles": frame.median_iqr(adds["memtrace-both"])[1],
        "--stacks_native_adds_ns": statistics.median(adds["memtrace-native"]),
        "stacks=all_adds_ns": statistics.median(adds["all"]), "stacks=all_quartiles": frame.median_iqr(adds["all"])[1],
        "ratio_to": "stacks=all", "ratio": compare.ratio_of(pairs), "ratio_95%": frame.bootstrap(pairs, compare.ratio_of),
    }


def main():
    import torch

    help_text = subprocess.run([frame.MEMTRACE, "run", "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    if "both" not in help_text:
        raise SystemExit("this memtrace has no --stacks both")
    measured = under.memtrace("native", "record_child.py", "forked", ",".join(KINDS))
    compare.check(under.losses("native"), measured["pairs"])
    frame.done("native", [row(found) for found in measured["found"]], "Medians of rounds, as in `record`. Depth counts Python frames; the native "
               "frames between them come on top.", **frame.conditions(torch))


main()
