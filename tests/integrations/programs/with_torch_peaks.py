"""Runs a program, and writes PyTorch's own peak of each part that a PeakMeter measured into peaks.json.

usage: with_torch_peaks.py PROGRAM
"""

import json
import runpy
import sys

import torch

from gpu_memtrace.integrations import PeakMeter

peaks = []
start, stop = PeakMeter.start, PeakMeter.stop


def started(meter):
    torch.cuda.reset_peak_memory_stats()
    start(meter)


def stopped(meter):
    was_started = meter.is_started
    peak = torch.cuda.max_memory_allocated()
    metrics = stop(meter)
    if was_started:
        peaks.append({"torch": peak, "metrics": metrics})
    return metrics


PeakMeter.start, PeakMeter.stop = started, stopped
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
with open("peaks.json", "w") as file:
    json.dump(peaks, file)
