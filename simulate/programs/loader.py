"""A DataLoader with worker processes and page-locked memory."""
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.arange(1000.0).view(250, 4), torch.arange(250))
if __name__ == "__main__":
    torch.empty(1, device="cuda")
    rows = []
    for a, b in DataLoader(data, 25, num_workers=2, pin_memory=True):
        assert a.is_pinned() and b.is_pinned()
        rows.append(b.cuda(non_blocking=True).cpu())
    assert torch.equal(torch.cat(rows), torch.arange(250))
    if hasattr(torch.cuda, "host_memory_stats"):
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] > 0
