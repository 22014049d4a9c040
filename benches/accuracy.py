#!/usr/bin/env python3
"""Categories of blocks against torch.profiler's own memory timeline of the same run: byte-time in agreement, the confusion, the causes.

Seven programs run under memtrace with `torch.profiler` enabled from their first line. They run as recorded by default,
without tensor names, and (without --gpu) with their tensors on the CPU. Blocks are matched one to one by address and
time. Each byte counts for as long as it is in use, under PyTorch's category and under ours at that time.

    accuracy.py [--from FOLDER]    FOLDER: recordings and answers of an earlier run (ACCURACY_KEEP=FOLDER)
"""

import bisect
import csv
import collections
import json
import os
import pathlib
import subprocess
import sys

import frame

PROGRAMS = ["mlp", "resnet50", "transformer", "accumulation", "checkpointing", "frozen", "language"]
# The agreement is computed over these categories.
FIVE = ["parameter", "gradient", "activation", "optimizer_state", "input"]
CATEGORIES = [*FIVE, "temporary", "autograd_detail"]
UNKNOWN = "unknown"
# Each way to record: its name, the tensors' device, memtrace's options.
WAYS = [("as recorded", "cuda", []), ("without names", "cuda", ["--no-names"])]
if not frame.GPU:
    WAYS.append(("tensors on the CPU", "cpu", ["--cpu", "always"]))
# The maximum number of lines in the table of causes.
CAUSES = 8


def record(program, folder, device, steps, options):
    """Runs one program; writes its recording and PyTorch's answer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    answer, run = folder / f"{program}.json", folder / program
    child = pathlib.Path(__file__).with_name("accuracy_child.py")
    subprocess.run([frame.MEMTRACE, "-o", run, "--quiet", *options, "--", sys.executable, child, program, device, str(steps), answer],
                   check=True, stdout=subprocess.DEVNULL)
    return run, answer


def ours(run, folder, device):
    """Our blocks on the device, by address, each list in order of time."""
    table = folder / f"{run.name}.csv"
    subprocess.run([frame.MEMTRACE, "export", run, "--to", "csv", "-o", table], check=True, stderr=subprocess.DEVNULL)
    found = collections.defaultdict(list)
    with open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (int(row["device"]) < 0) != (device == "cpu"):
                continue
            found[int(row["address"])].append(row)
    for blocks in found.values():
        blocks.sort(key=lambda row: int(row["alloc_ns"]))
    return found


def clock_offset(blocks, found):
    """The median time between our clock reading of an allocation and that of PyTorch's profiler, in nanoseconds."""
    apart = []
    for address, size, created, _, _ in blocks:
        if created > 0:
            near = [int(row["alloc_ns"]) for row in found.get(address, ()) if int(row["size"]) == size]
            if near:
                apart.append(min((created - at for at in near), key=abs))
    apart.sort()
    return apart[len(apart) // 2] if apart else 0


def nearest(starts, when):
    after = bisect.bisect_left(starts, when)
    return min((place for place in (after - 1, after) if 0 <= place < len(starts)), key=lambda p: abs(starts[p] - when), default=0)


def compare(answer, found):
    """Byte-time by (PyTorch's category, ours), by cause, and the blocks without a match on either side."""
    blocks = answer["blocks"]
    offset = clock_offset(blocks, found)
    last = max((int(row["free_ns"] or 0) or int(row["alloc_ns"]) for rows in found.values() for row in rows), default=0)
    confusion, causes = collections.Counter(), collections.Counter()
    matched, unmatched, taken = 0, 0, set()
    for address, size, created, destroyed, categories in blocks:
        rows = found.get(address, [])
        starts = [int(row["alloc_ns"]) for row in rows]
        # A block older than the profiler has no creation time, so it matches the first block at its address.
        place = nearest(starts, created - offset) if created > 0 else 0
        row = rows[place] if rows else None
        if row is None or int(row["size"]) != size or row["alloc_seq"] in taken:
            unmatched += 1
            continue
        taken.add(row["alloc_seq"])
        matched += 1
        begin, end = starts[place], int(row["free_ns"] or last)
        edges = [begin, *(when - offset for _, when in categories[1:]), end]
        for (category, _), since, until in zip(categories, edges, edges[1:]):
            weight = size * max(0, min(until, end) - max(since, begin))
            theirs = category or UNKNOWN
            our = row["category"]
            confusion[theirs, our] += weight
            if theirs != our:
                where = row["frame"].rsplit("site-packages/", 1)[-1].removeprefix(f"{frame.ROOT}/")
                causes[theirs, our, row["rule"], row["node"], where] += weight
    alone = collections.Counter()
    for rows in found.values():
        for row in rows:
            if row["alloc_seq"] not in taken:
                alone[row["category"]] += int(row["size"]) * (int(row["free_ns"] or last) - int(row["alloc_ns"]))
    return confusion, causes, alone, matched, unmatched


def share(part, whole):
    return 100.0 * part / whole if whole else None


def figures(confusion):
    """Two shares: agreement where PyTorch names one of the five categories, and where either side does."""
    same = sum(confusion[name, name] for name in FIVE)
    theirs = sum(weight for (a, _), weight in confusion.items() if a in FIVE)
    either = sum(weight for (a, b), weight in confusion.items() if a in FIVE or b in FIVE)
    return share(same, theirs), share(same, either)


def add_agreement(name, program, answer, found, rows):
    confusion, causes, alone, matched, unmatched = compare(answer, found)
    strict, either = figures(confusion)
    whole = sum(confusion.values())
    rows.append({"table": f"agreement, {name}", "program": program, "blocks": matched, "without_partner": unmatched,
                 "agreement_percent": strict, "where_either_says_one_of_the_five_percent": either,
                 "all_categories_percent": share(sum(w for (a, b), w in confusion.items() if a == b), whole)})
    return confusion, causes, alone


def main():
    keep = os.environ.get("ACCURACY_KEEP")
    earlier = pathlib.Path(sys.argv[sys.argv.index("--from") + 1]) if "--from" in sys.argv else None
    folder = earlier or pathlib.Path(keep or frame.SCRATCH)
    steps = 2 if frame.QUICK else 4
    rows, tail = [], []
    for name, device, options in WAYS:
        total, every = collections.Counter(), collections.Counter()
        for program in PROGRAMS[:2] if frame.QUICK else PROGRAMS:
            frame.say(f"{program}, {name}")
            here = folder / name.replace(" ", "-")
            run, file = (here / program, here / f"{program}.json") if earlier else record(program, here, device, steps, options)
            answer = json.loads(file.read_text())
            confusion, causes, alone = add_agreement(name, program, answer, ours(run, here, device), rows)
            total.update(confusion)
            for key, weight in causes.items():
                every[(program, *key)] += weight
            for category, weight in alone.items():
                total["(no tensor)", category] += weight
        known = collections.Counter({key: weight for key, weight in total.items() if key[0] != "(no tensor)"})
        strict, either = figures(known)
        rows.append({"table": f"agreement, {name}", "program": "all", "agreement_percent": strict,
                     "where_either_says_one_of_the_five_percent": either,
                     "all_categories_percent": share(sum(w for (a, b), w in known.items() if a == b), sum(known.values()))})
        columns = sorted({ours for _, ours in total}, key=lambda c: (CATEGORIES.index(c) if c in CATEGORIES else 99, c))
        for theirs in [*CATEGORIES, UNKNOWN, "(no tensor)"]:
            tail.append({"table": f"byte-time in GiB s, PyTorch's categories down, ours across, {name}", "PyTorch": theirs,
                         **{c: total[theirs, c] / 2**30 / 1e9 for c in columns}})
        whole = sum(known.values())
        for (program, theirs, our, rule, node, where), weight in every.most_common(CAUSES * (1 if frame.QUICK else 2)):
            tail.append({"table": f"largest disagreements, {name}", "program": program, "PyTorch": theirs, "ours": our, "our_rule": rule,
                         "node": node, "frame": where, "percent_of_byte_time": share(weight, whole)})
    import torch

    frame.done("accuracy", rows + tail, about="Byte-time of blocks whose category PyTorch's own memory profiler gives as we do; "
               "agreement: of those that it calls parameter, gradient, activation, optimizer state or input.",
               **frame.conditions(torch), steps=steps)


if __name__ == "__main__":
    main()
