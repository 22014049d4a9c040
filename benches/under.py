"""Runs a helper of this folder under memtrace."""

import json
import os
import subprocess
import sys

import frame


def losses(name):
    """The run's event counts: recorded, lost and others."""
    return json.loads((frame.SCRATCH / name / "run.json").read_text())["losses"]


def counted(name, counter):
    """A counter of each process of the run."""
    return [process["counters"].get(counter, 0) for process in json.loads((frame.SCRATCH / name / "run.json").read_text())["processes"]]


def memtrace(name, helper, *arguments, options=(), env=()):
    """Returns the JSON that the helper printed; the recording is in SCRATCH/name."""
    done = subprocess.run(
        [frame.MEMTRACE, "run", "--quiet", "--no-snapshot", "-o", frame.SCRATCH / name, *options, "--",
         sys.executable, frame.HERE / helper, *arguments],
        env=dict(os.environ, **dict(env)), stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{helper} {' '.join(arguments)} ended with status {done.returncode}")
    return json.loads(done.stdout)
