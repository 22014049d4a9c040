"""Checks that two memtrace snapshots, of two runs of one program, show the same backward events.

    python forward.py A.pickle B.pickle

A backward event is (device, action, size, autograd node, forward_frames). The order is ignored, because threads run in
any order. Prints the number of these events, and of those with a forward call, as JSON.
"""

import json
import pickle
import sys
from collections import Counter

from same import node


def backward_events(path):
    with open(path, "rb") as f:
        traces = pickle.load(f)["device_traces"]
    return Counter(
        (device, e["action"], e["size"], node(e["frames"]), tuple(e.get("forward_frames", ())))
        for device, trace in enumerate(traces)
        for e in trace
        if node(e["frames"])
    )


def main():
    a, b = (backward_events(path) for path in sys.argv[1:3])
    for event, count in [*(a - b).items(), *(b - a).items()][:1]:
        raise SystemExit(f"{count} only in {'the first' if event in a - b else 'the second'}: {event}")
    forward = sum(count for event, count in a.items() if event[-1])
    print(json.dumps({"backward": sum(a.values()), "forward": forward}))


if __name__ == "__main__":
    main()
