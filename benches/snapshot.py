#!/usr/bin/env python3
"""`memtrace report` of a PyTorch snapshot: beside Python's pickle.load and json.load of the same file."""

import json
import statistics
import subprocess
import sys

import analysis
import frame

ROUNDS = 1 if frame.QUICK else 5
EVENTS = 100_000 if frame.QUICK else 1_000_000

LOAD = """
import gzip, json, pickle, sys, time
path = sys.argv[1]
start = time.perf_counter()
with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
    found = (json if ".json" in path else pickle).load(file)
seconds = time.perf_counter() - start
with open("/proc/self/status", encoding="ascii") as status:
    mib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
print(json.dumps({"s": seconds, "mib": mib, "events": sum(map(len, found["device_traces"]))}))
"""

CONVERT = """
import gzip, json, pickle, sys
found = pickle.load(open(sys.argv[1], "rb"))
json.dump(found, open(sys.argv[2], "w"))
gzip.open(sys.argv[3], "wb", 1).write(open(sys.argv[1], "rb").read())
"""


def rows(what, path):
    frame.say(what)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(analysis.measure([frame.MEMTRACE, "report", path]))
        done = subprocess.run([sys.executable, "-c", LOAD, path], check=True, stdout=subprocess.PIPE)
        theirs.append(json.loads(done.stdout))
    median = statistics.median
    seconds, load = median(o["s"] for o in ours), median(t["s"] for t in theirs)
    mib, load_mib = max(o["mib"] for o in ours), min(t["mib"] for t in theirs)
    return {"snapshot": what, "events": theirs[0]["events"], "file_MB": path.stat().st_size / 1e6, "memtrace_report_s": seconds,
            "Python_load_s": load, "ratio": seconds / load, "memtrace_MiB": mib, "Python_MiB": load_mib, "ratio_of_memory": mib / load_mib}


def main():
    analysis.KEPT.mkdir(parents=True, exist_ok=True)
    scratch = frame.SCRATCH
    synthetic, theirs = scratch / "synthetic.pickle", scratch / "pytorch.pickle"
    subprocess.run([frame.MEMTRACE, "export", "--to", "snapshot", "-o", synthetic, analysis.trace_of(analysis.synthetic(EVENTS))], check=True)
    frame.say(f"PyTorch records {EVENTS:,} events")
    done = subprocess.run([sys.executable, frame.HERE / "analysis_loop.py", str(EVENTS), theirs, "1"], check=True, stdout=subprocess.PIPE)
    torch = json.loads(done.stdout)["torch"]
    as_json, packed = scratch / "pytorch.json", scratch / "pytorch.pickle.gz"
    subprocess.run([sys.executable, "-c", CONVERT, theirs, as_json, packed], check=True)
    found = [rows("PyTorch's own, GPT-2 and ResNet-50", theirs), rows("the same, gzipped", packed), rows("the same as JSON", as_json),
             rows("ours, synthetic", synthetic)]
    frame.done("snapshot", found, about="The whole of `memtrace report`, start and all passes included, beside nothing but Python's loading of "
               "the same file (pickle.load, json.load; its start and imports are not counted); medians, the most memory of ours and the "
               "least of theirs.", **frame.conditions(), torch=torch)


if __name__ == "__main__":
    main()
