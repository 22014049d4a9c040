#!/usr/bin/env python3
"""The HTML page in headless Chromium: size, time to the first picture, frames a second while panning: beside PyTorch's MemoryViz.js.

CHROMIUM=PATH    (default: on PATH)
"""

import json
import pathlib
import shutil
import subprocess

import analysis
import frame

SIZES = [100_000] if frame.QUICK else [100_000, 1_000_000, 10_000_000]
# The largest snapshot for MemoryViz.js: it draws the first picture of 100,000 events after most of a minute.
LARGEST_PEER = 100_000
SEED = "7"
TABLE = "Opening a page and panning it; the ratio is the page's frames a second to MemoryViz.js's"
# The two pages: the peer draws a snapshot of the same events.
NAMES = {False: "page of memtrace", True: "MemoryViz.js with the snapshot"}


def rows_of(events, folder, viewer):
    page, snapshot = frame.SCRATCH / "page.html", frame.SCRATCH / "page.pickle"
    wrote = analysis.measure([frame.MEMTRACE, "export", "--to", "html", "-o", page, folder])
    arguments = [page]
    if events <= LARGEST_PEER:
        subprocess.run([frame.MEMTRACE, "export", "--to", "snapshot", "-o", snapshot, folder], check=True, stderr=subprocess.DEVNULL)
        arguments += ["--viewer", viewer, "--snapshot", snapshot]
    frame.say(f"{events:,} events: opening")
    done = subprocess.run([frame.ROOT / "scripts/web", "--bench", "--json", *arguments], check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    for one in found:
        is_peer = one["name"] == "MemoryViz.js"
        row = {"table": TABLE, "what": NAMES[is_peer], "events": events, "file_MB": one["bytes"] / 1e6,
               "first_picture_s": one["first_picture_ms"] / 1e3 if "first_picture_ms" in one else one["error"],
               "frames_per_s": one.get("frames_per_s")}
        if not is_peer:
            row |= {"write_s": wrote["s"], "write_peak_MiB": wrote["mib"]}
            if len(found) > 1 and found[1].get("frames_per_s"):
                row |= {"ratio_to": NAMES[True], "ratio": one["frames_per_s"] / found[1]["frames_per_s"]}
        yield row
    page.unlink()
    snapshot.unlink(missing_ok=True)


def main():
    analysis.KEPT.mkdir(parents=True, exist_ok=True)
    got = subprocess.run([frame.ROOT / "tests/vizcheck/get-viewer.sh"], check=True, stdout=subprocess.PIPE, text=True)
    rows = []
    for events in SIZES:
        folder = analysis.synthetic(events, SEED)
        rows += rows_of(events, folder, pathlib.Path(got.stdout.strip()))
        if analysis.KEPT == frame.SCRATCH:
            shutil.rmtree(folder)
    frame.done("page", rows, "A made-up training run in which no step is like another (synthetic_run with a seed). The page pans a window of a quarter of the "
               "run, the viewer zooms with the wheel; both for 4 s, and the viewer's frame in progress is waited for.", **frame.conditions())


if __name__ == "__main__":
    main()
