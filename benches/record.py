#!/usr/bin/env python3
"""The cost of recording for one torch.empty + free, at stack depths and thread counts; CPU tensors beside profilers."""

import json
import os
import statistics
import subprocess
import sys

import compare
import frame
import turns
import under

MEMRAY = "memray==1.20.0"


def row(found):
    samples = found["samples"]
    ours, python, everything = (compare.added(samples, kind) for kind in ("memtrace", "python", "all"))
    pairs = list(zip(ours, python))
    floor = compare.added(samples, turns.PAUSED) if turns.PAUSED in samples else None
    return {
        "threads": found["threads"], "depth": found["depth"], "rounds": len(samples["off"]),
        "nothing_recorded_ns": statistics.median(samples["off"]),
        "memtrace_adds_ns": statistics.median(ours), "quartiles": frame.median_iqr(ours)[1],
        **({"attached_but_paused_adds_ns": statistics.median(floor)} if floor else {}),
        "stacks=python_adds_ns": statistics.median(python), "stacks=python_quartiles": frame.median_iqr(python)[1],
        "stacks=all_adds_ns": statistics.median(everything), "stacks=all_quartiles": frame.median_iqr(everything)[1],
        "ratio_to": "stacks=python", "ratio": compare.ratio_of(pairs), "ratio_95%": frame.bootstrap(pairs, compare.ratio_of),
        "ratio_to_stacks=all": compare.ratio_of(list(zip(ours, everything))),
    }


def memray():
    """The environment that makes memray importable; empty where PyPI cannot be reached."""
    if frame.GPU:
        return {}
    folder = frame.CACHE / f"{MEMRAY}-py{sys.version_info[0]}.{sys.version_info[1]}"
    if not (folder / "memray").is_dir():
        frame.say(f"installing {MEMRAY}")
        done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", folder, MEMRAY],
                              capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
    return {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])}


def cpu_row(loop, kind, peer):
    """One recorder of CPU tensors beside a peer; ratios are of the time that each adds."""
    samples = loop["samples"]
    ours, theirs = compare.added(samples, "memtrace"), compare.added(samples, kind)
    pairs = list(zip(ours, theirs))
    off = statistics.median(samples["off"])
    return {
        "table": "CPU tensors at stack depth 20: ns for one iteration, processes taking turns", "loop": loop["loop"],
        "nothing_recorded_ns": off, "memtrace_adds_ns": statistics.median(ours), "quartiles": frame.median_iqr(ours)[1],
        "memtrace_slows_down_by": f"{statistics.median(samples['memtrace']) / off:.2f} x",
        "ratio_to": peer, "peer_adds_ns": statistics.median(theirs), "peer_quartiles": frame.median_iqr(theirs)[1],
        "peer_slows_down_by": f"{statistics.median(samples[kind]) / off:.2f} x",
        "ratio": compare.ratio_of(pairs), "ratio_95%": frame.bootstrap(pairs, compare.ratio_of),
    }


def cpu_rows():
    found = under.memtrace("cpu", "record_cpu_child.py", options=["--cpu", "always"], env=memray())
    if under.losses("cpu")["lost"]:
        raise SystemExit(f"events of CPU tensors were lost: {under.losses('cpu')}")
    peers = {"profiler": "torch.profiler(profile_memory, with_stack)"}
    peers |= {"memray": f"memray {version}" for version in found["versions"].values()}
    return [cpu_row(loop, kind, peer) for loop in found["loops"] for kind, peer in peers.items()]


def main():
    import torch

    rows = []
    for method in turns.METHODS:
        measured = under.memtrace(method, "record_child.py", method, ",".join(turns.KINDS + turns.METHODS[method].more))
        compare.check(under.losses(method), measured["pairs"])
        title = f"ns for one torch.empty(1000, device=\"cuda\") and its free, {turns.METHODS[method].about}"
        rows += [{"table": title, **row(one)} for one in measured["found"]]
    rows += cpu_rows()
    frame.done("record", rows, "Medians of rounds; what a recorder adds is the median of the differences to the round's run with nothing "
               "recorded; attached but paused: what PyTorch does for a listener, and our way in and out. Wall time of all threads, by the number of pairs of all threads.", **frame.conditions(torch))


main()
