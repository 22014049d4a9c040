"""Converts a snapshot pickle that PyTorch wrote into the JSON that tests/tests/recording/golden_snapshots.rs replays.

    python from_pickle.py SNAPSHOT.pickle[.gz] > NAME.json

Frames and stacks are tables (a stack is [parent, frame]); an event is [action, addr, size, stream, time_us, stack]. The
segments are PyTorch's own, with stacks in place of frames.
"""
import gzip
import json
import pickle
import sys

ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
           "snapshot", "oom"]


def main():
    path = sys.argv[1]
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
        snapshot = pickle.load(f)
    frames, stacks = {}, {}

    def stack_of(item):
        at = 0
        for frame in reversed(item.get("frames", [])):
            key = (frame["name"], frame["filename"], frame["line"])
            frame_id = frames.setdefault(key, len(frames) + 1)
            at = stacks.setdefault((at, frame_id), len(stacks) + 1)
        return at

    traces = [[[ACTIONS.index(e["action"]), e.get("addr", e.get("device_free")), e["size"], e["stream"], e["time_us"],
                stack_of(e)] for e in trace] for trace in snapshot["device_traces"]]
    segments = [dict(s, frames=None, stack=stack_of(s),
                     blocks=[dict(b, frames=None, stack=stack_of(b)) for b in s["blocks"]]) for s in snapshot["segments"]]
    for item in [*segments, *(b for s in segments for b in s["blocks"])]:
        del item["frames"]
    json.dump({"frames": list(frames), "stacks": list(stacks), "traces": traces, "segments": segments}, sys.stdout,
              separators=(",", ":"))
    print()


main()
