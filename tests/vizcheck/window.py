"""window.py SNAPSHOT...: prints the blocks in use at the beginning and at the end of each snapshot, as JSON.

The end is the content of its segments. The beginning is computed as viewers do: backward from the end, undoing each
event. Fails where an event cannot be undone: the block of an allocation is missing, or that of a free exists. Fails too
where blocks do not tile their segment.
"""

import json
import pickle
import sys


def live(snapshot, device):
    blocks = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        at, active, allocated = segment["address"], 0, 0
        for block in segment["blocks"]:
            assert block["address"] == at, f"a gap at {at:#x}"
            at += block["size"]
            if block["state"] != "inactive":
                blocks[block["address"]] = block["requested_size"]
                active += block["size"]
            if block["state"] == "active_allocated":
                allocated += block["size"]
        assert at == segment["address"] + segment["total_size"], f"segment {segment['address']:#x} is not tiled"
        assert (active, allocated) == (segment["active_size"], segment["allocated_size"]), "sums"
    return blocks


def reconstruct(snapshot, device, trace):
    end = live(snapshot, device)
    there = dict(end)
    times = [e["time_us"] for e in trace]
    assert times == sorted(set(times)), "times grow strictly"
    for e in reversed(trace):
        if e["action"] == "alloc":
            assert there.pop(e["addr"], None) == e["size"], f"allocates {e['addr']:#x}, which is not there"
        elif e["action"] == "free_completed":
            assert e["addr"] not in there, f"frees {e['addr']:#x}, which is still there"
            there[e["addr"]] = e["size"]
    pairs = lambda blocks: sorted([a, s] for a, s in blocks.items())
    return {"events": len(trace), "start": pairs(there), "end": pairs(end)}


def main():
    states = []
    for path in sys.argv[1:]:
        with open(path, "rb") as file:
            snapshot = pickle.load(file)
        states.append([reconstruct(snapshot, i, t) for i, t in enumerate(snapshot["device_traces"])])
    json.dump(states, sys.stdout)


main()
