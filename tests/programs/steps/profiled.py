"""Prints how often torch.profiler saw each name in three steps, as JSON."""

import collections
import json

import torch
from torch.profiler import ProfilerActivity, profile, record_function

torch.empty(64, device="cuda")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
counts = collections.Counter()


def ready(profiler):
    counts.update(e.name for e in profiler.events())


schedule = torch.profiler.schedule(wait=0, warmup=0, active=3)
with profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready) as profiler:
    for _ in range(3):
        with record_function("forward"):
            loss = model(torch.randn(4, 64, device="cuda")).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        profiler.step()
print(json.dumps(counts, sort_keys=True))
