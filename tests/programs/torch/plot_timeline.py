"""Plots a timeline's JSON with PyTorch's own code, in the same way as `export_memory_timeline_html` plots its data.

    plot_timeline.py TIMELINE.json OUT.html
"""

import json
import sys

from torch.profiler._memory_profiler import MemoryProfileTimeline

with open(sys.argv[1], encoding="utf-8") as file:
    times, sizes = json.load(file)
consumer = MemoryProfileTimeline.__new__(MemoryProfileTimeline)
consumer._coalesce_timeline = lambda device: (times, sizes)
consumer.export_memory_timeline_html(sys.argv[2], "cuda:0")
