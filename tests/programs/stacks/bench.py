"""Measures captures: unchanged stack, changed leaf line, first capture; at several depths."""

import statistics
import sys

from probe import Probe

probe = Probe(False)
library = probe.library
once = library.probe_time_once
nothing = statistics.median(library.probe_time_nothing() for _ in range(2000))


def at_depth(depth, work):
    """Runs `work` under `depth` frames, including its own and this module's."""
    if depth > 2:
        return at_depth(depth - 1, work)
    return work()


def unchanged():
    return min(library.probe_time_unchanged(1000) for _ in range(300))


def leaf_line_changed():
    times = []
    for _ in range(3000):
        times.append(once())
        times.append(once())
        times.append(once())
    return statistics.median(times) - nothing


def leaf():
    return once()


def other_leaf():
    return once()


def other_callee():
    times = []
    for _ in range(3000):
        times.append(leaf())
        times.append(other_leaf())
    return statistics.median(times) - nothing


def down(n):
    return once() if n == 0 else down(n - 1)


def depth_changed():
    times = []
    for _ in range(1000):
        times.append(down(3))
        times.append(down(0))
        times.append(down(1))
    return statistics.median(times) - nothing


def new_frame():
    """A new frame on top of a known stack: its text is read, and one frame and one stack are defined."""
    times = []
    for n in range(1000):
        space = {"once": once}
        exec("def function_%d_%d():\n    return once()\n" % (depth, n), space)
        times.append(space["function_%d_%d" % (depth, n)]())
    return statistics.median(times) - nothing


def first_time():
    """Every frame is new and the tables are empty, so their memory pages are touched for the first time too."""
    times = []
    for _ in range(100):
        library.probe_forget()
        times.append(once())
    return statistics.median(times) - nothing


def verification():
    """The first capture of a process: every frame is new, and the layout is verified."""
    times = []
    for _ in range(20):
        library.probe_reset()
        times.append(once())
    return statistics.median(times) - nothing


if not probe.capture():
    sys.exit("no stack: " + probe.reason())
columns = (unchanged, leaf_line_changed, other_callee, depth_changed, new_frame, first_time, verification)
titles = ("unchanged", "new line", "sibling", "up, down", "new frame", "first", "verifying")
print(("%-8s %6s" + " %10s" * 7 + "   ns a capture") % ((sys.version.split()[0], "depth") + titles))
sys.setrecursionlimit(5000)
for depth in (2, 20, 60, 1000):
    figures = [at_depth(depth, work) for work in columns]
    print(("%-8s %6d" + " %10.1f" * 4 + " %10.0f" * 3) % ("", depth, *figures))
