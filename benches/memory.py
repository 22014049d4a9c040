#!/usr/bin/env python3
"""Host memory after 1, 10 and 100 M events, bytes of the trace an event, events lost."""

import json
import os
import subprocess
import sys
import time

import frame
import models
import under

MIB = 1 << 20
MILLION = 1_000_000
SCALE = 100 if frame.QUICK else 1


def proportional(pid):
    """The process's memory in bytes: PSS (its private memory and its share of shared memory), RSS, and PSS without
    files. The last is for
    processes whose libraries a varying number of other processes map too."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in rollup if line.endswith("kB\n")}
    return found["Pss"], found["Rss"], found["Pss_Anon"] + found["Pss_Shmem"]


def high_water(pid):
    """The peak resident memory in bytes; 0 for a process that has ended."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")), 0)


class WaitingProcess:
    """A process, under memtrace or not, that waits after its work until `end`."""

    def __init__(self, name, command, memtrace, **environment):
        self.folder = frame.SCRATCH / name
        prefix = [frame.MEMTRACE, "run", "--quiet", "--no-snapshot", "-o", self.folder, "--"] if memtrace else []
        self.process = subprocess.Popen([*prefix, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=dict(os.environ, **environment))
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{command}: died")
        self.report = json.loads(line)
        self.traced = proportional(self.report["pid"])
        self.launcher = proportional(self.process.pid) if memtrace else (0, 0, 0)

    def end(self):
        """Lets the process end. Returns the peak resident memory of the first process, which is the launcher where
        there is one."""
        self.process.stdin.write("\n")
        self.process.stdin.close()
        peak = 0
        # wait4's value is not usable: it includes the memory that our own process had when it forked.
        while self.process.poll() is None:
            peak = max(peak, high_water(self.process.pid))
            time.sleep(0.005)
        if self.process.returncode != 0:
            sys.exit(f"{self.folder}: ended with {self.process.returncode}")
        return peak

    def losses(self):
        return json.loads((self.folder / "run.json").read_text())["losses"]


def recorded(folder):
    """Events and bytes of a run with one process."""
    process, = json.loads((folder / "run.json").read_text())["processes"]
    return process["events"], process["bytes"]


def build():
    """Builds the program `load` over the driver that does nothing, and returns the environment that it needs."""
    driver, load = frame.SCRATCH / "libcuda.so.1", frame.SCRATCH / "load"
    compiler = ["cc", "-O2", "-o"]
    subprocess.run([*compiler, driver, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", frame.HERE / "nulldriver.c"], check=True)
    subprocess.run([*compiler, load, frame.HERE / "load.c", driver, "-lpthread"], check=True)
    return load, {"LD_LIBRARY_PATH": str(frame.SCRATCH)}


def growth(load, environment):
    plain = WaitingProcess("plain", [load, 1, 1000, 0], False, **environment)
    plain.end()
    rows = []
    for millions in (1, 10, 100):
        events = millions * MILLION // SCALE
        waiting = WaitingProcess(f"growth-{millions}", [load, 1, events, MILLION], True, **environment)
        pss = waiting.traced[0] + waiting.launcher[0] - plain.traced[0]
        peak = waiting.end()
        count, size = recorded(waiting.folder)
        rows.append({
            "table": "Host memory that memtrace adds to the traced process and the launcher together: cuMemAlloc and cuMemFree of a driver that does nothing, "
                     "1 M events a second, at the end of the run",
            "events": count, "traced_process_added_RSS_MiB": (waiting.traced[1] - plain.traced[1]) / MIB, "launcher_RSS_MiB": waiting.launcher[1] / MIB,
            "added_in_all_PSS_MiB": pss / MIB, "launcher_peak_with_end_summary_MiB": peak / MIB, "lost": waiting.losses()["lost"],
            "trace_bytes_an_event": size / count, "ratio_to": "itself after 1 M events",
        })
        rows[-1]["ratio"] = rows[-1]["added_in_all_PSS_MiB"] / rows[0]["added_in_all_PSS_MiB"]
        frame.say(f"memory: {count:,} events, {pss / MIB:.1f} MiB")
        for file in waiting.folder.iterdir():
            file.unlink()
    return rows


def available():
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))


def beside_pytorch():
    def measure(kind, events):
        waiting = WaitingProcess(f"held-{kind}-{events}", [sys.executable, frame.HERE / "memory_child.py", "held", kind, events], kind == "memtrace")
        waiting.end()
        return waiting.traced[2] + waiting.launcher[0]

    rows = []
    for millions in (1, 10):
        events = millions * MILLION // SCALE
        # PyTorch's recorder keeps all events, so it runs only where there is enough memory.
        if rows and rows[-1]["stacks=python_PSS_MiB"] * 10 * MIB > available() / 2:
            frame.say("memory: too little for PyTorch's recorder at 10 M events")
            break
        plain = measure("off", 1000)
        ours, theirs = measure("memtrace", events) - plain, measure("python", events) - plain
        rows.append({"table": "Host memory that recording adds to a PyTorch process: torch.empty and free at stack depth 20; the traced process "
                     "without its files", "events": events,
                     "memtrace_PSS_MiB": ours / MIB, "stacks=python_PSS_MiB": theirs / MIB, "ratio_to": "stacks=python, default max_entries",
                     "ratio": ours / theirs})
        frame.say(f"memory: PyTorch process, {events:,} events, {ours / MIB:.1f} MiB, PyTorch's recorder {theirs / MIB:.1f} MiB")
    return rows


def sizes():
    rows = []
    for model in ("eager", "mlp", "resnet50-32", "gpt2"):
        theirs = under.memtrace(f"bytes-{model}", "memory_child.py", "bytes", model, str(300_000 // SCALE))
        events, size = recorded(frame.SCRATCH / f"bytes-{model}")
        rows.append({"table": "Bytes on disk, PyTorch's recorder on in the same process", "program": models.NAMES[model],
                     "events": events, "memtrace_bytes_an_event": size / events, "PyTorch_events": theirs["events"],
                     "pickle_bytes_an_event": theirs["bytes"] / theirs["events"], "ratio_to": "PyTorch's pickle",
                     "ratio": size / events / (theirs["bytes"] / theirs["events"])})
        frame.say(f"memory: {models.NAMES[model]}, {size / events:.2f} bytes an event")
    return rows


def lost(load, environment):
    rows = []
    for rate in (MILLION, 0):
        for threads in (1, 2, 4):
            events = (10 if rate else 20) * MILLION // SCALE
            waiting = WaitingProcess(f"lost-{rate}-{threads}", [load, threads, events, rate], True, **environment)
            waiting.end()
            losses = waiting.losses()
            gone = losses["lost"] + losses["unwritten"] + losses["dropped"]
            rows.append({"table": "Events lost on this machine's cores", "speed": "1 M events/s" if rate else "as fast as it can", "threads": threads,
                         "events": events, "M_events/s": events / waiting.report["seconds"] / MILLION,
                         "lost": gone,
                         "ratio_to": "all events", "ratio": gone / events})
            frame.say(f"memory: {threads} threads, {rows[-1]['M_events/s']:.2f} M events/s, lost {gone:,}")
    return rows


def main():
    import torch

    load, environment = build()
    rows = growth(load, environment) + beside_pytorch() + sizes() + lost(load, environment)
    frame.done("memory", rows, "A hook waits for room in a full ring before it gives an event up: a loop that does nothing else is slowed "
               "down by recording, and what is lost then was not taken for as long as a hook may wait.", **frame.conditions(torch))


main()
