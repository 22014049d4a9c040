#!/usr/bin/env python3
"""load + full summary, snapshot export: beside _dump_snapshot, pickle.load, _memory_viz and Mosaic.

BENCH_RECORDINGS=DIR   keep the recordings in DIR and reuse them; PyTorch records 100 M events only with it (20 minutes)
BENCH_MOSAIC=PYTHON    a Python that can `import mosaic` (Meta's, github.com/facebookresearch/mosaic; not on PyPI);
                       without it Mosaic's rows are left out
"""

import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time

import frame

HERE = pathlib.Path(__file__).resolve().parent
MOSAIC = os.environ.get("BENCH_MOSAIC")
KEPT = pathlib.Path(os.environ.get("BENCH_RECORDINGS") or frame.SCRATCH)
SYNTHETIC = [100_000, 1_000_000] if frame.QUICK else [1_000_000, 10_000_000, 100_000_000]
TRAINING = [100_000] if frame.QUICK else [1_000_000, 10_000_000] + [100_000_000] * ("BENCH_RECORDINGS" in os.environ)
# The number of events for Python's tools: with ten times as many they need more memory than most machines have.
PEERS = TRAINING[0]
ROUNDS = 1 if frame.QUICK else 5
# A snapshot has tens of bytes an event. Above this number of events it goes to /dev/null only.
LARGEST_FILE = 10_000_000


def high_water(pid, seen):
    """Notes the peak memory (KiB) of a process and its child processes, by process id."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            seen[pid] = max(seen.get(pid, 0), *(int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            for child in children.read().split():
                high_water(int(child), seen)
    except (FileNotFoundError, ProcessLookupError):
        pass


def measure(command):
    """Wall-clock seconds, CPU seconds and peak memory (MiB) of a command, including its start and its child processes
    (memtrace reads
    files in a separate process). The memory is the sum of each process's peak, so shared memory counts twice."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen, over = {}, threading.Event()

    def watch():
        # The peak only grows, so the last value seen is the peak. wait4 would report the parent's peak where that is
        # larger.
        while not over.wait(0.002):
            high_water(process.pid, seen)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    over.set()
    watcher.join()
    if process.returncode != 0:
        sys.exit(f"{command}: status {process.returncode}")
    return {"s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "mib": sum(seen.values()) / 1024}


def synthetic(events, *seed):
    folder = KEPT / "-".join(["synthetic", str(events), *seed])
    if not folder.exists():
        frame.say(f"making {events:,} events")
        subprocess.run(["cargo", "build", "--release", "--quiet", "--manifest-path", frame.ROOT / "Cargo.toml", "-p", "memtrace-analysis",
                        "--example", "synthetic_run"], check=True)
        program = pathlib.Path(frame.MEMTRACE).parent / "examples" / "synthetic_run"
        subprocess.run([program, folder, str(events), *seed], check=True, stdout=subprocess.DEVNULL)
    return folder


def training(events):
    folder = KEPT / f"training-{events}"
    if not folder.exists():
        frame.say(f"recording {events:,} events")
        subprocess.run([frame.MEMTRACE, "run", "-q", "--no-snapshot", "-o", folder, sys.executable, HERE / "analysis_loop.py", str(events)],
                       check=True)
    return folder


def trace_of(folder):
    return max(folder.glob("*.mtr"), key=lambda path: path.stat().st_size)


def count(folder):
    """The number of events in a recording, including our own and CUDA calls."""
    done = subprocess.run([frame.MEMTRACE, "report", "--json", trace_of(folder)], check=True, capture_output=True)
    return json.loads(done.stdout)["run"]["events"]


def ours(folder, into_file=True):
    """One round: the summary, the snapshot to /dev/null, and the snapshot to a file."""
    trace = trace_of(folder)
    out = frame.SCRATCH / "out.pickle"
    found = {"report": measure([frame.MEMTRACE, "report", trace]),
             "nowhere": measure([frame.MEMTRACE, "export", "--to", "snapshot", "-o", "/dev/null", trace])}
    if into_file:
        found["file"] = measure([frame.MEMTRACE, "export", "--to", "snapshot", "-o", out, trace])
        found["size"] = out.stat().st_size
        out.unlink()
    return found


def own_rows(kind, folder):
    frame.say(folder.name)
    events, size = count(folder), trace_of(folder).stat().st_size
    into_file = events <= 2 * LARGEST_FILE
    rounds = [ours(folder, into_file) for _ in range(ROUNDS if into_file else 2)]

    def best(what):
        return min((r[what] for r in rounds), key=lambda m: m["s"])

    report, nowhere, file = best("report"), best("nowhere"), best("file") if into_file else {}
    pickled = rounds[0].get("size")
    return [{"table": "Load and full summary (`memtrace report`), best of the rounds", "recording": kind, "events": events,
             "trace_bytes_per_event": size / events, "s": report["s"], "CPU_s": report["cpu_s"],
             "ns_per_event": 1e9 * report["s"] / events, "peak_MiB": max(r["report"]["mib"] for r in rounds)},
            {"table": "Snapshot export (`memtrace export`), best of the rounds", "recording": kind, "events": events,
             "to_/dev/null_s": nowhere["s"], "CPU_s": nowhere["cpu_s"], "ns_per_event": 1e9 * nowhere["s"] / events,
             "into_a_file_s": file.get("s"), "file_bytes_per_event": pickled and pickled / events,
             "peak_MiB": max(r[k]["mib"] for r in rounds for k in ("nowhere", "file") if k in r)}]


def peer(tool, snapshot, viz):
    python = MOSAIC if tool == "mosaic" else sys.executable
    done = subprocess.run([python, HERE / "analysis_peer.py", tool, snapshot, frame.SCRATCH, viz], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
    return json.loads(done.stdout)


def peer_rows(folder):
    """Python's tools on PyTorch's own snapshot and ours on our trace of the same program, taking turns."""
    frame.say(f"PyTorch records {PEERS:,} events")
    snapshot = frame.SCRATCH / "pytorch.pickle"
    dumps = 1 if frame.QUICK else 3
    recorder = json.loads(subprocess.run([sys.executable, HERE / "analysis_loop.py", str(PEERS), snapshot, str(dumps)], check=True,
                                         stdout=subprocess.PIPE).stdout)
    viz = importlib.util.find_spec("torch").submodule_search_locations[0] + "/cuda/_memory_viz.py"
    tools = ["load", "stats", "trace", "trace_plot"]
    found = {tool: [] for tool in tools}
    own = []
    for round_ in range(min(ROUNDS, 3)):
        frame.say(f"round {round_ + 1}: {', '.join(tools)}")
        own.append(ours(folder))
        for tool in tools:
            found[tool].append(peer(tool, snapshot, viz))
    if MOSAIC:
        frame.say("Mosaic")
        found["mosaic"] = [peer("mosaic", snapshot, viz)]
        own.append(ours(folder))
    events = found["load"][0]["events"]
    median = statistics.median
    summary, summary_mib = median(o["report"]["s"] for o in own), max(o["report"]["mib"] for o in own)
    export, export_mib = median(o["file"]["s"] for o in own), max(o["file"]["mib"] for o in own)
    table = f"GPT-2 and ResNet-50, {events:,} events; medians; a ratio is memtrace's time to the peer's"
    rows = [{"table": table, "what": "memtrace export", "s": export, "peak_MiB": export_mib, "file_MB": own[0]["size"] / 1e6},
            {"table": table, "what": "memtrace report", "s": summary, "peak_MiB": summary_mib, "file_MB": trace_of(folder).stat().st_size / 1e6}]

    def add(what, seconds, mib, mine, to, size=None):
        rows.append({"table": table, "what": what, "s": seconds, "peak_MiB": mib, "file_MB": size, "ratio_to": to, "ratio": mine / seconds})

    add("_dump_snapshot", median(recorder["dump_s"]), recorder["dump_mib"], export, "_dump_snapshot (export)", recorder["bytes"] / 1e6)
    load = median(p["load_s"] for p in found["load"])
    add("pickle.load", load, found["load"][0]["mib"], summary, "pickle.load (report)")
    for tool in tools[1:]:
        whole = median(p["load_s"] + p["tool_s"] for p in found[tool])
        add(f"pickle.load + _memory_viz {tool}", whole, found[tool][0]["mib"], summary, f"_memory_viz {tool} (report)")
    if MOSAIC:
        add("Mosaic, categories", found["mosaic"][0]["categories_s"], found["mosaic"][0]["mib"], summary, "Mosaic (report)")
    return rows, recorder["torch"]


def main():
    KEPT.mkdir(parents=True, exist_ok=True)
    rows, torch = peer_rows(training(PEERS))
    for events in TRAINING:
        rows += own_rows("GPT-2 and ResNet-50", training(events))
    for events in SYNTHETIC:
        rows += own_rows("synthetic", synthetic(events))
        if KEPT == frame.SCRATCH:
            shutil.rmtree(synthetic(events))
    frame.done("analysis", sorted(rows, key=lambda row: row["table"], reverse=True), about="How long what comes after a run takes, and how "
               "much memory; processes are measured whole, start included, but for the peers, whose imports are not counted.",
               **frame.conditions(), torch=torch)


if __name__ == "__main__":
    main()
