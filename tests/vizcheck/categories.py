"""Compares the categories of blocks with the tensors that Python had, at the samples of `programs/walked/walked.py`.

    python3 categories.py WALKED CSV...

CSV: tables of blocks (`memtrace export --to csv`), one for each process, with its id in the name. Prints as JSON the
number of samples and of storages compared, the largest share of bytes in use with a wrong category, in percent, and by
difference the bytes at the worst sample.

A block is wrong if a walked tensor of another kind is in it, or if its category is parameter, gradient or optimizer
state and no such tensor is in it.
"""

import csv
import json
import re
import sys

OF_OBJECTS = ("parameter", "gradient", "optimizer_state")
# Memory that a graph saves can also be a cast that autocast keeps.
ALLOWED = {"activation": {"activation", "autocast_cache"}}


def read(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    never = 1 << 63
    return [(int(r["alloc_ns"]), int(r["free_ns"] or never), int(r["address"]), int(r["size"]), r) for r in rows]


def compare(sample, rows):
    in_use = {address: (size, row) for start, end, address, size, row in rows if start <= sample["ns"] < end}
    kinds = {address: kind for kind in ("activation", *reversed(OF_OBJECTS)) for address in sample.get(kind, [])}
    wrong = {}

    def differs(size, text):
        wrong[text] = wrong.get(text, 0) + size

    for address, (size, row) in in_use.items():
        kind, category = kinds.get(address), row["category"]
        if kind is None and category in OF_OBJECTS:
            differs(size, f"no {category}: {row['rule']} {row['module']} {row['frame']}")
        elif kind is not None and category not in ALLOWED.get(kind, {kind}):
            differs(size, f"{kind} as {category}: {row['rule']} {row['module']} {row['frame']}")
    for address in kinds.keys() - in_use.keys():
        differs(0, f"{kinds[address]} at {address:#x} in no block")
    total = sum(size for size, _ in in_use.values())
    return 100 * sum(wrong.values()) / max(total, 1), len(kinds), wrong


def main():
    walked, tables = sys.argv[1], sys.argv[2:]
    by_process = {int(re.findall(r"\d+", path)[-1]): read(path) for path in tables}
    with open(walked) as file:
        samples = [json.loads(line) for line in file]
    results = [compare(sample, by_process[sample["pid"]]) for sample in samples]
    percent, _, wrong = max(results, key=lambda result: result[0], default=(0, 0, {}))
    compared = sum(count for _, count, _ in results)
    print(json.dumps({"samples": len(samples), "compared": compared, "wrong_percent": percent, "wrong": wrong}))


main()
