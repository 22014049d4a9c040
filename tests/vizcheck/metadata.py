"""Prints each text of `user_metadata` in a snapshot, and the number of allocations that have it, as JSON.

    python metadata.py SNAPSHOT.pickle

Every event has the key; only allocations may have a text.
"""

import json
import pickle
import sys
from collections import Counter


def main():
    with open(sys.argv[1], "rb") as f:
        snapshot = pickle.load(f)
    texts = Counter()
    for event in (e for trace in snapshot["device_traces"] for e in trace):
        text = event["user_metadata"]
        if text and event["action"] != "alloc":
            raise SystemExit(f"{event['action']} with {text!r}")
        texts[text] += bool(text)
    print(json.dumps({text: count for text, count in texts.items() if text}))


if __name__ == "__main__":
    main()
