"""Checks the phases (`category`) in a snapshot of tests/programs/torch/cpu.py.

    python phases.py OURS.pickle "load other forward backward ..."

The words are the program's phases in order; tensors of 1000003 bytes and a little more separate them. Every allocation
must have the phase of its section; "other" allows any phase. Prints the number of each, as JSON.
"""

import json
import pickle
import sys
from collections import Counter

FIRST_MARK = 1000003


def main():
    with open(sys.argv[1], "rb") as f:
        trace = pickle.load(f)["device_traces"][0]
    phases = sys.argv[2].split()
    allocations = [e for e in trace if e["action"] == "alloc"]
    seen, current = Counter(), None
    for event in allocations:
        mark = event["size"] - FIRST_MARK
        if 0 <= mark < len(phases):
            current = phases[mark]
        elif current not in (None, "other", "end"):
            if event["category"] != current:
                raise SystemExit(f"{event['size']} bytes of {current} are said to be {event['category']}: {event['frames']}")
            seen[current] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
