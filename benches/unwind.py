#!/usr/bin/env python3
"""One native stack, beside libunwind and the C library's backtrace: unchanged, changed, first."""

import ctypes.util
import json
import os
import pathlib
import statistics
import subprocess
import sys

import frame

# The number of the program's functions below `main`. With the C library's and the program's own: about 10, 40 and 100
# frames.
DEPTHS = [3, 33, 93]
ROUNDS = 20 if frame.QUICK else 400
PROCESSES = 3 if frame.QUICK else 25
LIBUNWIND = ctypes.util.find_library("unwind") or "libunwind.so.8"
PEERS = {"unw_backtrace": "libunwind", "backtrace": "glibc"}


def probe():
    """The path of the library that has memtrace's unwinder alone."""
    if "STACKPROBE" in os.environ:
        return os.environ["STACKPROBE"]
    subprocess.run(["cargo", "build", "--release", "--quiet", "--manifest-path", frame.ROOT / "Cargo.toml", "-p", "memtrace-stackprobe"],
                   stdout=sys.stderr, check=True)
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", frame.ROOT / "target")).resolve() / "release" / "libmemtrace_stackprobe.so"


def build():
    program = frame.SCRATCH / "unwind"
    subprocess.run(["gcc", "-O2", "-fomit-frame-pointer", "-Wall", "-o", program, frame.HERE / "unwind.c", "-ldl", "-lpthread"], check=True)
    return program


def libunwind():
    """The name to load libunwind by; None where it is missing or has no `unw_backtrace`."""
    try:
        return LIBUNWIND if hasattr(ctypes.CDLL(LIBUNWIND), "unw_backtrace") else None
    except OSError:
        return None


def row(case, frames, samples):
    """A table row from each unwinder's samples, in nanoseconds a capture."""
    ours = samples["memtrace"]
    peer = "unw_backtrace" if "unw_backtrace" in samples else "backtrace"
    result = {"table": "ns for one native stack", "case": case, "frames": frames, "memtrace_ns": statistics.median(ours),
              "quartiles": frame.median_iqr(ours)[1]}
    for name, by in PEERS.items():
        result[f"{by}_ns"] = statistics.median(samples[name]) if name in samples else None
    if samples.get(peer):
        result["ratio_to"] = PEERS[peer]
        result["ratio"] = statistics.median(ours) / statistics.median(samples[peer])
    return result


def main():
    program, library, unwind = build(), probe(), libunwind()

    def run(depth, first, rounds=ROUNDS):
        done = subprocess.run([program, library, unwind or "none", str(depth), first, str(rounds)], stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            sys.exit(f"unwind {depth} {first}: status {done.returncode}")
        return json.loads(done.stdout)

    kinds = ["memtrace", *(name for name in PEERS if unwind or name != "unw_backtrace")]
    rows = []
    for depth in DEPTHS:
        for found in run(depth, "-"):
            nothing = statistics.median(found["nothing"])
            samples = {kind: [one - nothing for one in found[kind]] for kind in kinds}
            rows.append(row(found["case"], found["frames"], samples))
        threads = run(depth, "thread", PROCESSES)
        rows.append(row("first of a thread", threads[0]["frames"], {"memtrace": [one["ns"] for one in threads[1:]]}))
        first = {kind: [] for kind in kinds}
        for _ in range(PROCESSES):
            for kind in kinds:
                found = run(depth, kind)
                first[kind].append(found["ns"])
        rows.append(row("first of a process", found["frames"], first))
        frame.say(f"unwind: {rows[-1]['frames']} frames")
    rows.sort(key=lambda one: [one["case"] == "first of a process", one["case"] == "first of a thread"])
    frame.done("unwind", rows, "Medians; what the calls around a capture take is subtracted. Two call paths: the innermost 15 functions are others "
               "each time (with 10 frames: 2), as those of taking memory and of giving it back are; eight: also of other depths, up to seven less. At each place memtrace's return addresses "
               "were compared with the peer's, one by one: they are equal. memtrace's figures include naming "
               "the stack by an id, the peers' do not. First of a process: no unwinder's cache has anything; libgcc_s, glibc's unwinder, is loaded.", **frame.conditions(), peer=unwind or "libunwind is missing", libc=os.confstr("CS_GNU_LIBC_VERSION"))


main()
