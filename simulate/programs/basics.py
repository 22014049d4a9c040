"""Devices, their properties, the first allocation, copies, and the snapshot of PyTorch's own memory recorder."""
import os
import pickle
import tempfile

import torch

GIB = 1 << 30
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
properties = torch.cuda.get_device_properties(0)
assert (properties.major, properties.minor) == torch.cuda.get_device_capability(0) == (9, 0)
assert properties.total_memory == 8 * GIB and properties.multi_processor_count == 132
assert properties.name == torch.cuda.get_device_name(0) == "Simulated CUDA device"

torch.cuda.memory._record_memory_history(max_entries=100_000)
x = torch.empty(1024, device="cuda")
stats = torch.cuda.memory_stats()
assert stats["allocated_bytes.all.current"] == 4096
assert stats["reserved_bytes.all.current"] == 2 << 20
assert stats["segment.all.current"] == 1 and stats["num_alloc_retries"] == 0 and stats["num_ooms"] == 0
assert torch.cuda.mem_get_info() == (8 * GIB - (2 << 20), 8 * GIB)

y = torch.arange(1000).cuda()
assert torch.equal(y.cpu(), torch.arange(1000)), "what was copied to the device comes back"
assert torch.equal(y.clone().cpu(), torch.arange(1000)), "also after a copy on the device"

start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
end.record()
assert start.elapsed_time(end) >= 1, "autotuners repeat a kernel that takes microseconds 100,000 times"

path = os.path.join(tempfile.mkdtemp(), "snapshot.pickle")
torch.cuda.memory._dump_snapshot(path)
with open(path, "rb") as file:
    snapshot = pickle.load(file)
actions = [(event["action"], event["size"]) for event in snapshot["device_traces"][0]]
assert actions[:2] == [("segment_alloc", 2 << 20), ("alloc", 4096)], actions
frames = snapshot["device_traces"][0][1]["frames"]
assert any(frame["filename"] == __file__ for frame in frames), frames[:3]
