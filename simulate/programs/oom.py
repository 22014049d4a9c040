"""Fills the device completely. Checks PyTorch's error and counters, and its retry after flushing the cache."""
import torch

MIB = 1 << 20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def refused(mib):
    try:
        block(mib)
    except torch.cuda.OutOfMemoryError as error:
        return str(error)
    raise AssertionError(f"{mib} MiB were not refused")


blocks = [block(512) for _ in range(16)]
message = refused(512)
assert "Tried to allocate 512.00 MiB" in message and "8.00 GiB of which 0 bytes is free" in message, message
assert "this process has 8.00 GiB memory in use" in message, message
stats = torch.cuda.memory_stats()
assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
assert stats["reserved_bytes.all.current"] == 8 << 30
del blocks[:4]
assert "Tried to allocate 3.00 GiB" in refused(3 << 10)
large = block(2 << 10)
stats = torch.cuda.memory_stats()
assert (stats["num_ooms"], stats["reserved_bytes.all.current"]) == (2, 8 << 30)
