"""Checks a snapshot that memtrace wrote against PyTorch's own of the same process.

    python same.py OURS.pickle ORACLE.json [--forward]

ORACLE.json is what tests/programs/torch/oracle.py wrote. Everything the two must agree on is compared, and the first
difference ends the program with a message and status 1: the events of every device (action, address, size, stream, order,
Python frames), the segments and the blocks (all twelve and five keys). With --forward also `forward_frames`, string for
string, and every event that has some must name its autograd node.

Prints what was compared as one JSON object, so that a caller can see that it was not nothing.

memtrace puts the autograd node and its forward call above a backward event's own frames, between two frames whose file names
begin with "[autograd]"; PyTorch's frames are what follows the second. An oracle without Python stacks is not accepted.
"""

import argparse
import json
import pickle
from collections import Counter

SYNTHETIC = "[autograd]"
SEGMENT_KEYS = {"device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
                "segment_pool_id", "is_expandable", "frames", "blocks"}
BLOCK_KEYS = {"address", "size", "requested_size", "state", "frames"}
# PyTorch 2.11 and later write this key, under anomaly mode only.
OPTIONAL_KEYS = {"forward_frames"}
# The limit in microseconds between the two clocks, which are read at different times of one event. It detects a wrong
# unit or epoch.
CLOCKS_APART_US = 1_000_000
# The limit in microseconds for the steps between events: each side calibrates its own clock.
STEPS_APART_US = 200


def own(frames):
    """The frames that PyTorch itself would have recorded, from memtrace's frames."""
    synthetic = [i for i, f in enumerate(frames) if f["filename"].startswith(SYNTHETIC)]
    assert len(synthetic) <= 2 and synthetic[:1] in ([], [0]), f"synthetic frames at {synthetic}"
    if not synthetic:
        return frames
    return frames[synthetic[1] + 1:] if len(synthetic) == 2 else []


def node(frames):
    """The autograd node that an event or block names, or None."""
    return frames[0]["name"] if frames and frames[0]["filename"].startswith(SYNTHETIC) else None


def same(what, ours, theirs):
    assert ours == theirs, f"{what}:\n  ours      {ours}\n  PyTorch's {theirs}"


def plain(frames):
    """Name, file and line of each frame; PyTorch may add keys."""
    return [(f["name"], f["filename"], f["line"]) for f in frames]


def same_frames(what, ours, theirs):
    mine, other = plain(own(ours["frames"])), plain(theirs.get("frames", []))
    # Where there is no Python frame, memtrace takes a native stack and PyTorch takes none.
    if not other and not any(is_python(name) for _, name, _ in mine):
        return
    same(f"{what}, frames", mine, other)


def is_python(filename):
    return filename.endswith(".py") or filename.startswith("<")


def trace_of(events):
    """The events before the oracle's own snapshot, which PyTorch takes before it records the snapshot as an event."""
    events = list(events)
    while events and events[-1]["action"] == "snapshot":
        events.pop()
    return events


def compare_event(what, ours, theirs, forward, found):
    addr = "device_free" if theirs["action"] == "oom" else "addr"
    for key in ["action", addr, "size", "stream"]:
        same(f"{what}, {key}", ours.get(key), theirs[key])
    same_frames(what, ours, theirs)
    # PyTorch 2.12 and later.
    if "pool_id" in theirs:
        same(f"{what}, pool_id", list(ours["pool_id"]), list(theirs["pool_id"]))
        found["pool ids"] += 1
        found["private pool ids"] += any(theirs["pool_id"])
    found["events"] += 1
    found["event frames"] += len(theirs.get("frames", []))
    if "time_us" in theirs:
        apart = abs(ours["time_us"] - theirs["time_us"])
        assert apart < CLOCKS_APART_US, f"{what}: {apart} us apart"
    mine = ours.get("forward_frames")
    if mine is not None:
        assert node(ours["frames"]), f"{what}: forward frames without a node"
    if node(ours["frames"]):
        found["nodes"] += 1
    if forward:
        same(f"{what}, forward_frames ({node(ours['frames'])})", mine, theirs.get("forward_frames"))
        found["forward"] += mine is not None
        found["forward frames"] += len(mine or [])


def compare_completions(device, ours, theirs, found):
    """Compares the time between each free's request and its completion."""
    requested = {}
    for i, (mine, other) in enumerate(zip(ours, theirs)):
        if other["action"] == "free_requested":
            requested[other["addr"]] = i
        elif other["action"] == "free_completed" and "time_us" in other:
            request = requested.pop(other["addr"], i)
            waited = [e["time_us"] - es[request]["time_us"] for e, es in ((mine, ours), (other, theirs))]
            apart = abs(waited[0] - waited[1])
            assert apart < STEPS_APART_US, f"device {device}, event {i}: completed after {waited[0]}, {waited[1]} us"
            found["deferred frees"] += i > request + 1


def compare_segment(ours, theirs, found):
    what = f"segment {theirs['address']:#x}"
    same(f"{what}, keys", set(ours) - OPTIONAL_KEYS, SEGMENT_KEYS)
    for key in sorted(SEGMENT_KEYS - {"frames", "blocks", "segment_pool_id"}):
        same(f"{what}, {key}", ours[key], theirs[key])
    same(f"{what}, segment_pool_id", list(ours["segment_pool_id"]), list(theirs["segment_pool_id"]))
    same_frames(what, ours, theirs)
    layout = [[(b["address"], b["size"], b["state"]) for b in s["blocks"]] for s in (ours, theirs)]
    same(f"{what}, blocks", *layout)
    for mine, block in zip(ours["blocks"], theirs["blocks"]):
        what = f"block {block['address']:#x}, {block['state']}"
        same(f"{what}, keys", set(mine) - OPTIONAL_KEYS, BLOCK_KEYS)
        if block["state"] != "inactive":
            same(f"{what}, requested_size", mine["requested_size"], block["requested_size"])
            same_frames(what, mine, block)
            found["active blocks"] += 1
        found["blocks"] += 1
    found["segments"] += 1


def compare(ours, theirs, forward):
    """Raises AssertionError at the first difference; returns the counts of compared items."""
    found = Counter()
    devices = max(len(ours["device_traces"]), len(theirs["device_traces"]))
    for device in range(devices):
        mine, other = (trace_of(s["device_traces"][device]) if device < len(s["device_traces"]) else [] for s in (ours, theirs))
        times = [e["time_us"] for e in mine]
        assert all(a < b for a, b in zip(times, times[1:])), f"device {device}: times do not grow"
        for i, (a, b) in enumerate(zip(mine, other)):
            compare_event(f"event {i} of device {device}", a, b, forward, found)
        same(f"events of device {device}", len(mine), len(other))
        compare_completions(device, mine, other, found)
        found["devices"] += bool(mine)

    mine, other = (sorted(s["segments"], key=place) for s in (ours, theirs))
    same("segments", [place(s) for s in mine], [place(s) for s in other])
    for a, b in zip(mine, other):
        compare_segment(a, b, found)
    return found


def place(segment):
    return segment["device"], segment["address"]


def read(ours, oracle):
    with open(ours, "rb") as f, open(oracle) as g:
        return pickle.load(f), json.load(g)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("oracle")
    parser.add_argument("--forward", action="store_true", help="compare forward_frames too")
    args = parser.parse_args()
    print(json.dumps(compare(*read(args.ours, args.oracle), args.forward)))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as difference:
        raise SystemExit(str(difference))
