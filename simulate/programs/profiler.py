"""torch.profiler with CUDA activities and memory."""
import torch
from torch.profiler import ProfilerActivity, profile

with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as p:
    x = torch.randn(100, 100, device="cuda")
    (x @ x).sum()
assert "aten::mm" in {event.key for event in p.key_averages()}
