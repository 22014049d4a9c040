"""Stacks of PyTorch's own recorder, its out-of-memory observer, and the per-process memory fraction."""
import torch

torch.cuda.memory._record_memory_history(stacks="python")


def named():
    return torch.empty(1 << 20, device="cuda")


a = named()
del a
torch.cuda.empty_cache()
events = torch.cuda.memory._snapshot()["device_traces"][0]
assert [e["action"] for e in events] == [
    "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free",
], [e["action"] for e in events]
assert events[1]["frames"][0]["name"] == "named"

observed = []
torch._C._cuda_attach_out_of_memory_observer(lambda device, *sizes: observed.append(device))
for size, fraction in ((1 << 40, 1.0), (5 << 30, 0.5)):
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
        raise AssertionError(f"{size} bytes were not refused")
    except torch.cuda.OutOfMemoryError:
        pass
assert observed == [0, 0]
