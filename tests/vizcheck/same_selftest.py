"""Tests same.py: it must detect every single change to a snapshot that it accepts.

    python same_selftest.py OURS.pickle ORACLE.json

Both files must be of a program with backward passes under anomaly mode. Prints the number of changes that were tried.
"""

import copy
import json
import sys

from same import BLOCK_KEYS, SEGMENT_KEYS, compare, own, read


def changed(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return value + 512 if isinstance(value, int) else value


def setting(container, key, value):
    """A change that sets one item; `container` finds the item's container in a snapshot."""

    def change(snapshot):
        container(snapshot)[key] = value

    return change


def item_changes(find, item, keys):
    for key in keys:
        if key == "frames":
            frames = own(item["frames"])
            if frames:
                moved = [*item["frames"][:-1], dict(item["frames"][-1], line=item["frames"][-1]["line"] + 1)]
                yield f"{key}, a line", setting(find, key, moved)
                yield f"{key}, one less", setting(find, key, item["frames"][:-1])
            else:
                yield f"{key}, one more", setting(find, key, [{"name": "f", "filename": "f.py", "line": 1}])
        elif key == "segment_pool_id":
            yield key, setting(find, key, (item[key][0], item[key][1] + 1))
        elif key == "forward_frames":
            yield f"{key}, a letter", setting(find, key, [*item[key][:-1], item[key][-1].replace("line", "lime", 1)])
            yield f"{key}, missing", setting(find, key, None)
        elif key != "blocks":
            yield key, setting(find, key, changed(item[key]))


def changes(snapshot):
    trace = snapshot["device_traces"][0]
    middle = len(trace) // 2
    with_forward = next(i for i, e in enumerate(trace) if "forward_frames" in e)
    for index, keys in [(middle, ["action", "addr", "size", "stream", "frames"]), (with_forward, ["frames", "forward_frames"])]:
        for what, change in item_changes(lambda s, i=index: s["device_traces"][0][i], trace[index], keys):
            yield f"event {index}, {what}", change
    yield "a time twice", setting(lambda s: s["device_traces"][0][middle], "time_us", trace[middle - 1]["time_us"])
    yield "an event missing", lambda s: s["device_traces"][0].pop(middle)
    yield "an event twice", lambda s: s["device_traces"][0].insert(middle, dict(s["device_traces"][0][middle]))
    yield "two events exchanged", lambda s: exchange(s["device_traces"][0], middle)
    for what, change in item_changes(lambda s: s["segments"][0], snapshot["segments"][0], sorted(SEGMENT_KEYS)):
        yield f"a segment's {what}", change
    yield "a segment missing", lambda s: s["segments"].pop()
    at, block = next((i, b) for i, s in enumerate(snapshot["segments"]) for b in s["blocks"] if b["state"] != "inactive")
    index = snapshot["segments"][at]["blocks"].index(block)
    for what, change in item_changes(lambda s: s["segments"][at]["blocks"][index], block, sorted(BLOCK_KEYS)):
        yield f"a block's {what}", change
    yield "a block missing", lambda s: s["segments"][at]["blocks"].pop(index)


def exchange(events, index):
    """Exchanges an event with the next one that differs, but keeps their times."""
    other = next(i for i in range(index + 1, len(events)) if events[i]["addr"] != events[index]["addr"])
    a, b = events[index], events[other]
    events[index], events[other] = dict(b, time_us=a["time_us"]), dict(a, time_us=b["time_us"])


def main():
    ours, theirs = read(*sys.argv[1:3])
    compare(ours, theirs, True)
    tried = 0
    for what, change in changes(ours):
        other = copy.deepcopy(ours)
        change(other)
        try:
            compare(other, theirs, True)
        except AssertionError:
            tried += 1
        else:
            raise SystemExit(f"not found out: {what}")
    print(json.dumps({"changes": tried}))


if __name__ == "__main__":
    main()
