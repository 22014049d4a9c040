"""Time of a capture: unchanged stack, leaf line changed, first time; at several depths."""

import statistics
import sys

from probe import Probe

probe = Probe(False)
library = probe.library
once = library.probe_time_once
nothing = statistics.median(library.probe_time_nothing() for _ in range(2000))


def at_depth(depth, work):
    """Runs `work` under `depth` frames, its own and this module's included."""
    if depth > 2:
        return at_depth(depth - 1, work)
    return work()


def unchanged():
    return min(library.probe_time_unchanged(200000) for _ in range(5))


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


def first_time():
    times = []
    for _ in range(300):
        library.probe_reset()
        times.append(once())
    return statistics.median(times) - nothing


if not probe.capture():
    sys.exit("no stack: " + probe.reason())
print("%-8s %6s %10s %10s %10s %10s %10s   ns a capture" % (
    sys.version.split()[0], "depth", "unchanged", "new line", "sibling", "up, down", "first"))
sys.setrecursionlimit(5000)
for depth in (2, 20, 60, 1000):
    figures = [at_depth(depth, work) for work in (unchanged, leaf_line_changed, other_callee, depth_changed, first_time)]
    print("%-8s %6d %10.1f %10.1f %10.1f %10.1f %10.0f" % ("", depth, *figures))
