"""A few steps of DDP or FSDP2 in several processes, one device each.

train.py ddp|fsdp [--spawn RANKS] [--oom RANK] [--compile BACKEND]
With --spawn this process starts the ranks by torch.multiprocessing.spawn; otherwise torchrun has. With --oom that rank asks for more
than a device has, after the steps.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist

import ranks


def run(rank, size, store, options):
    oracle = ranks.begin(rank, size, store, options.backend)
    model = ranks.network().cuda(rank)
    if options.kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        # The check of the ranks' shapes goes through a kernel on PyTorch 2.15.
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], init_sync=False)
    if options.compile:
        model = torch.compile(model, backend=options.compile)
    ranks.train(model, rank)
    if rank == options.oom:
        hold = [torch.empty(3 << 30, dtype=torch.uint8, device="cuda")]
        hold.append(torch.empty(100 << 30, dtype=torch.uint8, device="cuda"))
    dist.barrier()
    torch.cuda.synchronize()
    print(f"rank {rank} pid {os.getpid()}", flush=True)
    oracle.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ddp", "fsdp"))
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--oom", type=int, default=-1)
    parser.add_argument("--compile")
    parser.add_argument("--backend", default="nccl")
    options = parser.parse_args()
    if options.spawn:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.spawn, os.path.join(folder, "store"), options)
            torch.multiprocessing.spawn(run, arguments, nprocs=options.spawn)
    else:
        run(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), None, options)
