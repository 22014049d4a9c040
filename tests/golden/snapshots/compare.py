"""Compares a snapshot that memtrace wrote with PyTorch's own of the same run.

    python compare.py OURS.pickle EXPECTED.json

EXPECTED is PyTorch's snapshot as JSON, or the compact format that from_pickle.py writes. Exits with a message at the
first difference: an opcode that memory_viz does not support, an event, a segment, a block. Frames are compared without
the autograd frames that memtrace adds; forward_frames are compared where PyTorch has them.
"""
import json
import pickle
import pickletools
import sys

KNOWN = set("PROTO FRAME STOP EMPTY_DICT DICT SETITEM SETITEMS MARK EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE1 "
            "TUPLE2 TUPLE3 TUPLE BININT1 BININT2 BININT LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE NONE NEWTRUE NEWFALSE "
            "MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET".split())
ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
           "snapshot", "oom"]
SYNTHETIC = "[autograd]"
# The key that PyTorch writes only under anomaly mode.
EXTRA = {"forward_frames"}


def check_opcodes(data):
    for opcode, arg, _ in pickletools.genops(data):
        assert opcode.name in KNOWN, f"memory_viz does not know {opcode.name}"
        assert opcode.name != "PROTO" or arg <= 4, arg
        assert opcode.name != "LONG1" or -2**63 <= arg < 2**63, arg


def own_frames(frames):
    """The frames that PyTorch would have recorded: without the autograd node and its forward call."""
    marks = [i for i, f in enumerate(frames) if f["filename"].startswith(SYNTHETIC)]
    return frames if not marks else frames[marks[1] + 1:] if len(marks) > 1 else []


def expand(compact):
    """Expands the compact format to the structure that PyTorch writes."""
    def frames(stack):
        while stack:
            stack, frame = compact["stacks"][stack - 1]
            yield dict(zip(("name", "filename", "line"), compact["frames"][frame - 1]))

    def event(action, addr, size, stream, _, stack):
        key = "device_free" if ACTIONS[action] == "oom" else "addr"
        return {"action": ACTIONS[action], key: addr, "size": size, "stream": stream, "frames": list(frames(stack))}

    def framed(item):
        return {**{k: v for k, v in item.items() if k != "stack"}, "frames": list(frames(item["stack"]))}

    return {"device_traces": [[event(*e) for e in trace] for trace in compact["traces"]],
            "segments": [framed(dict(s, blocks=[framed(b) for b in s["blocks"]])) for s in compact["segments"]]}


def compare_item(what, ours, theirs, skip=()):
    for key, value in theirs.items():
        if key not in skip:
            got = own_frames(ours[key]) if key == "frames" else list(ours[key]) if key == "segment_pool_id" else ours[key]
            assert got == value, f"{what}: {key} is {got}, expected {value}"


def main():
    with open(sys.argv[1], "rb") as f:
        data = f.read()
    with open(sys.argv[2]) as f:
        expected = json.load(f)
    if "stacks" in expected:
        expected = expand(expected)
    check_opcodes(data)
    ours = pickle.loads(data)
    forward = 0
    for device, theirs in enumerate(expected["device_traces"]):
        mine = ours["device_traces"][device] if device < len(ours["device_traces"]) else []
        times = [e["time_us"] for e in mine]
        assert all(a < b for a, b in zip(times, times[1:])), "times do not grow"
        assert len(mine) == len(theirs), f"device {device}: {len(mine)} events, expected {len(theirs)}"
        for i, (m, t) in enumerate(zip(mine, theirs)):
            compare_item(f"device {device}, event {i}", m, t, {"time_us", "compile_context", "user_metadata", "pool_id"})
            assert {"time_us", "compile_context", "user_metadata"} <= set(m), m
            assert m["action"] != "alloc" or "category" in m
            forward += "forward_frames" in t
    if any(ours["device_traces"]):
        assert any(e.get("category") == "unknown" for t in ours["device_traces"] for e in t)
    assert len(ours["segments"]) == len(expected["segments"])
    for mine, theirs in zip(ours["segments"], expected["segments"]):
        what = f"segment {theirs['address']:#x}"
        compare_item(what, mine, theirs, {"blocks"})
        assert (set(mine) ^ set(theirs)) <= EXTRA, set(mine) ^ set(theirs)
        assert len(mine["blocks"]) == len(theirs["blocks"]), what
        for m, t in zip(mine["blocks"], theirs["blocks"]):
            compare_item(f"{what}, block {t['address']:#x}", m, t)
            assert (set(m) ^ set(t)) <= EXTRA, set(m) ^ set(t)
    print(f"{sum(map(len, expected['device_traces']))} events, {len(expected['segments'])} segments, {forward} forward_frames")


main()
