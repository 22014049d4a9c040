"""DDP and FSDP2 in two ranks, one device each, by torch.multiprocessing.spawn; each rank writes its tensors' names."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

import named


def run(rank, size, store, kind):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    model = named.mlp()
    if kind == "ddp":
        # On PyTorch 2.15 DDP's check of the ranks' shapes runs a kernel.
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], init_sync=False)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    oracle = named.Oracle(rank)
    named.train(model, lambda: torch.empty(64, 512, device="cuda"), optimizer=optimizer, oracle=oracle)
    dist.barrier()
    dist.destroy_process_group()
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (2, os.path.join(folder, "store"), sys.argv[1]), nprocs=2)
