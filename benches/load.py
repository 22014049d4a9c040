#!/usr/bin/env python3
"""Load: many threads, many processes, 50 M events: what is lost, memory, bytes an event, time beside the program without memtrace."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import frame

MIB = 1 << 20
SCALE = 100 if frame.QUICK else 1
TITLE = ("Allocations and frees of a driver that does nothing, as fast as the program can; the oracle is what it counts itself. Native stacks, "
         "as by default without Python")


def build():
    """Builds the program of tests/programs/load over the driver that does nothing, and returns its path."""
    driver, load = frame.SCRATCH / "libcuda.so.1", frame.SCRATCH / "load"
    compiler = ["cc", "-O2", "-o"]
    subprocess.run([*compiler, driver, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", frame.HERE / "nulldriver.c"], check=True)
    subprocess.run([*compiler, load, "-DDRIVER", frame.ROOT / "tests" / "programs" / "load" / "load.c", driver, "-lpthread"], check=True)
    return load


def of_status(text, name):
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Watch(threading.Thread):
    """Samples the launcher while it runs: peak private memory, peak memory with the rings (the traced processes' too),
    descriptors."""

    def __init__(self, process):
        super().__init__()
        self.process, self.own, self.all, self.descriptors = process, 0, 0, 0

    def run(self):
        folder = pathlib.Path("/proc", str(self.process.pid))
        while self.process.poll() is None:
            try:
                status = (folder / "status").read_text(errors="replace")
                self.own = max(self.own, of_status(status, "RssAnon"))
                self.all = max(self.all, of_status(status, "VmHWM"))
                self.descriptors = max(self.descriptors, len(os.listdir(folder / "fd")))
            except OSError:
                pass
            time.sleep(0.01)


def one(command, folder=None):
    """Runs the program, recorded into `folder` or alone. Returns its pairs, its seconds, its memory and the launcher's
    peaks."""
    prefix = [frame.MEMTRACE, "run", "--quiet", "--no-snapshot", "-o", folder, "--"] if folder else []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        process = subprocess.Popen([*prefix, *map(str, command)], stdout=out, stderr=errors,
                                   env=dict(os.environ, LD_LIBRARY_PATH=str(frame.SCRATCH), LOAD_STATUS="1"))
        watch = Watch(process)
        watch.start()
        watch.join()
        whole = time.monotonic() - start
        out.seek(0)
        errors.seek(0)
        output, status = out.read(), errors.read()
    if process.returncode != 0:
        sys.exit(f"{command}: ended with {process.returncode}: {status}")
    seconds = int(re.search(r"^us (\d+)", status, re.MULTILINE)[1]) / 1e6
    return {"pairs": sum(int(line.split()[2]) for line in output.splitlines()), "seconds": seconds, "whole": whole,
            "memory": of_status(status, "VmHWM"), "watch": watch}


def measure(load, what, command):
    folder = frame.SCRATCH / "run"
    plain = one([load, *command])
    ours = one([load, *command], folder)
    run = json.loads((folder / "run.json").read_text())
    losses, processes = run["losses"], run["processes"]
    counted = {name: sum(process["counters"].get(name, 0) for process in processes) for name in ("ring_wait_us", "shared_ring_events")}
    if losses["events"] + losses["lost"] + losses["dropped"] + losses["unwritten"] != 2 * ours["pairs"]:
        sys.exit(f"{what}: {2 * ours['pairs']} events made, of which the run knows {losses}")
    frame.say(f"load: {what}: {losses['events']:,} events in {ours['seconds']:.1f} s")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return {
        "table": TITLE, "what": what, "events": losses["events"], "lost": losses["lost"] + losses["dropped"] + losses["unwritten"],
        "late": losses["late"], "bytes_an_event": sum(process["bytes"] for process in processes) / losses["events"],
        "launcher_peak_MiB": ours["watch"].own / MIB, "with_rings_MiB": ours["watch"].all / MIB,
        "first_process_adds_MiB": (ours["memory"] - plain["memory"]) / MIB, "launcher_descriptors": ours["watch"].descriptors,
        "s": ours["seconds"], "s_alone": plain["seconds"], "ns_an_event_more": (ours["seconds"] - plain["seconds"]) / losses["events"] * 1e9,
        "thread_s_waited_for_room": counted["ring_wait_us"] / 1e6, "events_by_shared_ring": counted["shared_ring_events"],
    }


def main():
    load = build()
    threads = 6_400_000 // SCALE // 64
    rows = [
        measure(load, "64 threads", ["threads", 64, threads]),
        measure(load, "1 thread", ["threads", 1, 25_000_000 // SCALE]),
        measure(load, "64 threads, 50 M events", ["threads", 64, 25_000_000 // SCALE // 64]),
        measure(load, "10,000 short-lived threads, 32 at once", ["churn", 10_000, 32]),
        measure(load, "1,500 threads at once: 477 more than rings", ["alive", 1500, 10_000 // SCALE]),
        measure(load, "500 processes at once", ["children", 500, 10_000 // SCALE]),
        measure(load, "500 short-lived processes, each forked by the last", ["storm", 500]),
    ]
    frame.done("load", rows, "Seconds are the program's own, from its first thread to the end of its last; the launcher's memory is the most that was "
               "resident while it ran, its own (and with the rings, which it shares with the program).", **frame.conditions())


main()
