"""DistributedDataParallel over NCCL in two processes, one device each."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn


def main(rank, size, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    # DDP gathers the parameter shapes of all ranks to compare them. Later versions of PyTorch gather through a kernel,
    # and kernels do not run here.
    parts, own = [torch.zeros(1, device="cuda") for _ in range(size)], torch.ones(1).cuda()
    dist.all_gather(parts, own)
    torch.cuda.synchronize()
    without = {} if all(part.item() == 1 for part in parts) else {"init_sync": False}
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda(), device_ids=[rank], **without)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == rank
    assert torch.cuda.memory_reserved() > 0 and torch.cuda.memory_reserved(1 - rank) == 0
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (2, os.path.join(folder, "store")), 2)
    sys.exit(0)
