"""FSDP1 (FullyShardedDataParallel, flat parameters) in two ranks; the first prints categories, as categories.py does.

    flat.py original|flat
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import purpose


def run(rank, size, store, kind):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    note = purpose.note if rank == 0 else lambda tensor, category: None
    inner = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).cuda(),
                                     use_orig_params=kind == "original")
    model = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64).cuda(), inner, torch.nn.Linear(64, 8).cuda()),
                                     use_orig_params=kind == "original")
    first = inner.module[0]
    first.register_forward_pre_hook(lambda module, _: note(module.weight, "communication_bucket"))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
        for parameter in model.parameters():
            note(parameter.grad, "gradient")
        optimizer.step()
        optimizer.zero_grad()
        for part in (model, inner):
            note(part._handle.flat_param._local_shard, "parameter")
        for state in optimizer.state.values():
            note(state["exp_avg"], "optimizer_state")
    dist.barrier()
    if rank == 0:
        print("peak", torch.cuda.max_memory_allocated())
    dist.destroy_process_group()
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (2, os.path.join(folder, "store"), sys.argv[1]), nprocs=2)
