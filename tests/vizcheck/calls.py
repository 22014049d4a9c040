"""Checks a snapshot that memtrace made of CUDA calls: of an allocator that PyTorch's own recorder refuses, or of no PyTorch at all.

    python calls.py OURS.pickle [--ledger LEDGER] [--like ORACLE.json [--besides MEMORY]]

LEDGER is the simulated CUDA's: what was obtained and given back, call for call (address, size, stream, order), and what was there
at the end. ORACLE.json is what tests/programs/torch/oracle.py wrote of the same program under PyTorch's own allocator: the program
asks for the same memory at the same places (size, order, Python frames), whoever serves it. MEMORY is a JSON list of [address, size]
that other libraries (cuBLAS) obtained for themselves: PyTorch's allocator knows nothing of it.

Prints what was compared as one JSON object.
"""

import argparse
import json
import pickle
from collections import Counter

from same import plain, own, same, same_frames

GETS = {"cuMemAlloc_v2", "cuMemAllocPitch_v2", "cuMemAllocManaged", "cuMemAllocAsync", "cuMemAllocFromPoolAsync",
        "cuMemAllocAsync_ptsz", "cuMemAllocFromPoolAsync_ptsz"}
FREES = {"cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz"}


def served(path, device):
    """The calls that the driver served on a device, in order, as (action, address, size, stream); and the blocks left
    at the end."""
    with open(path) as f:
        lines = sorted((json.loads(line) for line in f), key=lambda line: line["seq"])
    calls, live = [], {}
    for line in lines:
        if line["layer"] != "driver" or line["result"] != 0 or line.get("device") != device or not line.get("addr"):
            continue
        stream = 0 if line["api"].endswith("_ptsz") and line.get("stream") == 2 else line.get("stream")
        if line["api"] in GETS:
            live[line["addr"]] = (line["size"], stream or 0)
            calls.append(("alloc", line["addr"], line["size"], stream or 0))
        elif line["api"] in FREES:
            size, own_stream = live.pop(line["addr"])
            calls.append(("free_requested", line["addr"], size, own_stream if stream is None else stream))
    return calls, live


def compare_events(events, calls, found):
    """Compares every allocation with its segment, and every free with its request, completion and segment."""
    expected = []
    for action, *rest in calls:
        actions = ["segment_alloc", "alloc"] if action == "alloc" else ["free_requested", "free_completed", "segment_free"]
        expected += [(a, *rest) for a in actions]
    for i, (ours, theirs) in enumerate(zip(events, expected)):
        same(f"event {i} (second: the ledger's)", (ours["action"], ours["addr"], ours["size"], ours["stream"]), theirs)
    same("events", len(events), len(expected))
    found["calls"] += len(calls)
    times = [e["time_us"] for e in events]
    assert all(a < b for a, b in zip(times, times[1:])), "times do not grow"


def compare_segments(segments, live, found):
    same("segments", sorted(s["address"] for s in segments), sorted(live))
    for segment in segments:
        size, stream = live[segment["address"]]
        what = f"segment {segment['address']:#x}"
        same(what, (segment["total_size"], segment["allocated_size"], segment["active_size"], segment["stream"]),
             (size, size, size, stream))
        blocks = [(b["address"], b["size"], b["requested_size"], b["state"]) for b in segment["blocks"]]
        same(f"{what}, blocks", blocks, [(segment["address"], size, size, "active_allocated")])
        assert segment["blocks"][0]["frames"], f"{what}: a block without frames"
        found["segments"] += 1


def compare_requests(events, theirs, besides, found):
    """Requires the same requests from the same frames as under PyTorch's own allocator, and the memory in `besides`."""
    of_others = [e for e in events if (e["addr"], e["size"]) in besides]
    same("other libraries' memory", sorted((e["addr"], e["size"]) for e in of_others if e["action"] == "alloc"), sorted(besides))
    found["of other libraries"] += len(besides)
    events = [e for e in events if (e["addr"], e["size"]) not in besides]
    asked = [[e for e in es if e["action"] in ("alloc", "free_requested")] for es in (events, theirs)]
    for i, (a, b) in enumerate(zip(*asked)):
        same(f"request {i}", (a["action"], a["size"]), (b["action"], b["size"]))
        same_frames(f"request {i}, {a['action']} of {a['size']}", a, b)
        found["requests"] += 1
        found["frames"] += len(plain(own(a["frames"])))
    same("requests", *map(len, asked))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("--ledger")
    parser.add_argument("--like")
    parser.add_argument("--besides", type=lambda text: [tuple(pair) for pair in json.loads(text)], default=[])
    args = parser.parse_args()
    with open(args.ours, "rb") as f:
        ours = pickle.load(f)
    found = Counter()
    for device, events in enumerate(ours["device_traces"]):
        if args.ledger:
            calls, live = served(args.ledger, device)
            compare_events(events, calls, found)
            compare_segments([s for s in ours["segments"] if s["device"] == device], live, found)
        if args.like:
            with open(args.like) as f:
                compare_requests(events, json.load(f)["device_traces"][device], args.besides, found)
        found["devices"] += bool(events)
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as difference:
        raise SystemExit(str(difference))
