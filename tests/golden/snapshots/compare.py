"""Checks a snapshot that memtrace wrote against the JSON of PyTorch's own (see from_pickle.py).

    python compare.py OURS.pickle EXPECTED.json

Exits with a message at the first difference: an opcode that memory_viz does not know, an event, a segment, a block.
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


def check_opcodes(data):
    for opcode, arg, _ in pickletools.genops(data):
        assert opcode.name in KNOWN, f"memory_viz does not know {opcode.name}"
        assert opcode.name != "PROTO" or arg <= 4, arg
        assert opcode.name != "LONG1" or -2**63 <= arg < 2**63, arg


def main():
    data = open(sys.argv[1], "rb").read()
    expected = json.load(open(sys.argv[2]))
    check_opcodes(data)
    ours = pickle.loads(data)

    def frames(stack):
        while stack:
            parent, frame = expected["stacks"][stack - 1]
            name, filename, line = expected["frames"][frame - 1]
            yield {"name": name, "filename": filename, "line": line}
            stack = parent

    assert len(ours["device_traces"]) >= len([t for t in expected["traces"] if t])
    for device, (mine, theirs) in enumerate(zip(ours["device_traces"], expected["traces"])):
        times = [e["time_us"] for e in mine]
        assert all(a < b for a, b in zip(times, times[1:])), "times do not grow"
        assert len(mine) == len(theirs), f"device {device}: {len(mine)} events, expected {len(theirs)}"
        for i, (m, (action, addr, size, stream, _, stack)) in enumerate(zip(mine, theirs)):
            key = "device_free" if ACTIONS[action] == "oom" else "addr"
            want = {"action": ACTIONS[action], key: addr, "size": size, "stream": stream, "frames": list(frames(stack))}
            got = {k: m[k] for k in want}
            assert got == want, f"event {i}: {got}, expected {want}"
            assert {"time_us", "compile_context", "user_metadata"} <= set(m), m
            assert action != 0 or "category" in m
    if any(ours["device_traces"]):
        assert any(e.get("category") == "unknown" for t in ours["device_traces"] for e in t)
    assert len(ours["segments"]) == len(expected["segments"])
    for mine, theirs in zip(ours["segments"], expected["segments"]):
        theirs = dict(theirs, frames=list(frames(theirs["stack"])), segment_pool_id=tuple(theirs["segment_pool_id"]),
                      blocks=[dict(b, frames=list(frames(b["stack"]))) for b in theirs["blocks"]])
        for item in [theirs, *theirs["blocks"]]:
            del item["stack"]
        for key, value in theirs.items():
            if key != "blocks":
                assert mine[key] == value, f"segment {theirs['address']:#x}: {key} {mine[key]}, expected {value}"
        assert len(mine["blocks"]) == len(theirs["blocks"]), f"segment {theirs['address']:#x}"
        for m, t in zip(mine["blocks"], theirs["blocks"]):
            assert m == t, f"block {m}, expected {t}"


main()
