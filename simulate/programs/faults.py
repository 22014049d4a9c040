"""Failures on demand: SIMCUDA_FAIL="cuMemAlloc_v2:3,cudaHostAlloc:1"."""
import torch

blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
# The third cuMemAlloc_v2 fails once. PyTorch then flushes its cache and retries with the fourth.
blocks.append(torch.empty(30 << 20, dtype=torch.uint8, device="cuda"))
stats = torch.cuda.memory_stats()
assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0), stats["num_alloc_retries"]
try:
    torch.empty(1000).pin_memory()
    raise AssertionError("cudaHostAlloc did not fail")
except RuntimeError as error:
    assert "out of memory" in str(error)
assert torch.empty(1000).pin_memory().is_pinned()
