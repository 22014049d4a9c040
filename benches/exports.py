#!/usr/bin/env python3
"""Every format of `memtrace export`, and `memtrace report` of the snapshot: beside pickle.load, _memory_viz trace_plot and Mosaic.

BENCH_MOSAIC=PYTHON    a Python that can `import mosaic` (analysis.py says which)
"""

import importlib.util
import shutil
import statistics
import subprocess

import analysis
import frame

SIZES = [100_000] if frame.QUICK else [100_000, 1_000_000, 10_000_000]
# The largest number of events for each of Python's tools: Mosaic takes 3.5 GB for a million.
PEERS = {"load": 10_000_000, "trace_plot": 10_000_000, "mosaic": 1_000_000}
NAMES = {"load": "pickle.load", "trace_plot": "pickle.load + _memory_viz trace_plot", "mosaic": "Mosaic, categories"}
FORMATS = {
    "snapshot": [],
    "csv": [],
    "timeline": [],
    "perfetto": [],
    "speedscope": [],
    "folded": ["--of", "total"],
    "pprof": [],
    "parquet": [],
    "snapshot, the last 1,000 events": ["--max-events", "1000"],
}
# The export whose work is nearest to each peer's; pickle.load only reads, so it does less than ours.
NEAREST = {"load": "report of the snapshot", "trace_plot": "timeline", "mosaic": "timeline"}
TABLE = "Medians; each of ours measured whole, start included; a ratio is memtrace's time to the peer's"


def export(trace, name, options):
    """Seconds and memory of one export, and the number of bytes that it wrote."""
    target = name.split(",")[0]
    out = frame.SCRATCH / {"timeline": "out.svg", "parquet": "tables"}.get(target, "out")
    found = analysis.measure([frame.MEMTRACE, "export", "--to", target, "-o", out, *options, trace])
    found["bytes"] = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return found


def rows_of(events, trace):
    rounds = 1 if frame.QUICK or events > 1_000_000 else 3
    snapshot = frame.SCRATCH / "snapshot.pickle"
    subprocess.run([frame.MEMTRACE, "export", "--to", "snapshot", "-o", snapshot, trace], check=True, stderr=subprocess.DEVNULL)
    viz = importlib.util.find_spec("torch").submodule_search_locations[0] + "/cuda/_memory_viz.py"
    peers = [name for name, most in PEERS.items() if events <= most and (name != "mosaic" or analysis.MOSAIC)]
    found = {name: [] for name in [*FORMATS, "report of the snapshot", *peers]}
    for round_ in range(rounds):
        for name, options in FORMATS.items():
            frame.say(f"{events:,} events, round {round_ + 1}: {name}")
            found[name].append(export(trace, name, options))
        found["report of the snapshot"].append(analysis.measure([frame.MEMTRACE, "report", snapshot]))
        for name in peers:
            frame.say(f"{events:,} events, round {round_ + 1}: {NAMES[name]}")
            one = analysis.peer(name, snapshot, viz)
            found[name].append({"s": one.get("categories_s") or one["load_s"] + one.get("tool_s", 0), "mib": one["mib"]})
    snapshot.unlink()
    seconds = {name: statistics.median(one["s"] for one in all_) for name, all_ in found.items()}
    for name, all_ in found.items():
        row = {"table": TABLE, "what": NAMES.get(name, name), "events": events, "s": seconds[name],
               "ns_per_event": 1e9 * seconds[name] / events, "peak_MiB": max(one["mib"] for one in all_)}
        if "bytes" in all_[0]:
            row["file_MB"] = all_[0]["bytes"] / 1e6
        if name in PEERS:
            mine = NEAREST[name]
            row |= {"ratio_to": f"{NAMES[name]} ({mine})", "ratio": seconds[mine] / seconds[name],
                    "ratio_of_memory": max(one["mib"] for one in found[mine]) / min(one["mib"] for one in all_)}
        yield row


def main():
    analysis.KEPT.mkdir(parents=True, exist_ok=True)
    rows = []
    for events in SIZES:
        rows += rows_of(events, analysis.trace_of(analysis.synthetic(events)))
        if analysis.KEPT == frame.SCRATCH:
            shutil.rmtree(analysis.synthetic(events))
    import torch

    frame.done("exports", rows, "A made-up training run of one process and one device (synthetic_run). The peers are given the snapshot that memtrace "
               "exports of it; their imports are not counted.", **frame.conditions(torch))


if __name__ == "__main__":
    main()
