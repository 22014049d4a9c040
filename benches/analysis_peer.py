"""Runs one of Python's tools on a snapshot in its own process, so that the process's memory is the tool's.

    python analysis_peer.py load|stats|trace|trace_plot|mosaic SNAPSHOT SCRATCH

Prints the seconds of each stage and the peak memory as JSON. `mosaic` needs Meta's Mosaic
(github.com/facebookresearch/mosaic).
"""

import contextlib
import importlib.util
import io
import json
import pickle
import sys
import time


def high_water():
    """The peak resident memory of this process, in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def viz(path):
    """torch.cuda._memory_viz, loaded from its file: it needs no other part of torch, whose memory would be counted
    too."""
    spec = importlib.util.spec_from_file_location("_memory_viz", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    tool, snapshot, scratch = sys.argv[1:4]
    times = {}
    if tool == "mosaic":
        from mosaic.cmd.entry_point import get_memory_profile

        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            get_memory_profile(snapshot=snapshot, out_path=f"{scratch}/mosaic.html", profile="categories")
        times["categories_s"] = time.perf_counter() - start
    else:
        tools = viz(sys.argv[4]) if tool != "load" else None
        start = time.perf_counter()
        with open(snapshot, "rb") as file:
            data = pickle.load(file)
        times["load_s"] = time.perf_counter() - start
        if tools:
            start = time.perf_counter()
            text = {"stats": tools.segsum, "trace": tools.trace, "trace_plot": tools.trace_plot}[tool](data)
            with open(f"{scratch}/{tool}.out", "w", encoding="utf-8") as out:
                out.write(text)
            times["tool_s"] = time.perf_counter() - start
        times["events"] = sum(len(trace) for trace in data["device_traces"])
    print(json.dumps({**times, "mib": high_water()}))


if __name__ == "__main__":
    main()
