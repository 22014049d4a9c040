"""Shared by the parts of the benchmark: conditions, statistics, and the result that `scripts/bench` reads from
stdout."""

import json
import math
import os
import pathlib
import platform
import random
import statistics
import sys

ROOT = pathlib.Path(os.environ["MEMTRACE_ROOT"])
MEMTRACE = os.environ["MEMTRACE_BIN"]
HERE = pathlib.Path(__file__).resolve().parent
SCRATCH = pathlib.Path(os.environ["BENCH_SCRATCH"])
CACHE = pathlib.Path(os.environ.get("MEMTRACE_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memtrace")
GPU = bool(os.environ.get("BENCH_GPU"))
QUICK = bool(os.environ.get("BENCH_QUICK"))


def say(text):
    print(f"  {text}", file=sys.stderr, flush=True)


def conditions(*modules):
    """The machine and the versions; each of `modules` has `__name__` and `__version__`."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        cpu = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), platform.machine())
    found = {"CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores", "Python": platform.python_version()}
    # Shows whether the machine was busy with other work.
    found["load average"] = round(os.getloadavg()[1], 1)
    for module in modules:
        found[module.__name__] = module.__version__
        if module.__name__ == "torch":
            found["GPU"] = module.cuda.get_device_name() if GPU else "simulated CUDA"
    return found


def median_iqr(samples):
    """The median and the lower and upper quartile."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return quartiles[1], [quartiles[0], quartiles[2]]


def bootstrap(samples, of=statistics.median, level=0.95, resamples=2000):
    """A confidence interval of `of(samples)`; equal samples give equal intervals."""
    draw = random.Random(0)
    found = sorted(of(draw.choices(samples, k=len(samples))) for _ in range(resamples))
    tail = int(resamples * (1 - level) / 2)
    return [found[tail], found[-1 - tail]]


def tidy(value):
    """Rounds numbers to six digits and replaces infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [tidy(one) for one in value]
    return value


def done(part, rows, about="", **conditions_):
    """Prints the part's result, which is the only text on stdout."""
    rows = [{key: tidy(value) for key, value in row.items()} for row in rows]
    json.dump({"part": part, "about": about, "conditions": conditions_, "rows": rows}, sys.stdout, indent=1)
    print()
