"""A few steps of DDP, FSDP2 or both in several processes, one device each.

train.py KIND... [--spawn RANKS] [--compile BACKEND] [--oom RANK]     KIND: ddp, fsdp
With --spawn this process starts the ranks with torch.multiprocessing.spawn; otherwise torchrun starts them. With --oom
that rank requests more than a device has after the steps, and the other ranks wait for it forever.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist

import ranks


def wrapped(kind, model, rank):
    if kind == "ddp":
        # On PyTorch 2.15 DDP's check of the ranks' shapes runs a kernel.
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], init_sync=False)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


def run(rank, size, store, options):
    oracle = ranks.begin(rank, size, store)
    for kind in options.kind:
        model = wrapped(kind, ranks.network().cuda(rank), rank)
        ranks.train(torch.compile(model, backend=options.compile) if options.compile else model, rank)
        del model
    if rank == options.oom:
        hold = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        hold = [hold, torch.empty(1 << 40, dtype=torch.uint8, device="cuda")]
    if options.oom >= 0:
        dist.distributed_c10d._get_default_store().wait(["what nobody sets"])
    dist.barrier()
    # One call for the whole line: the other rank writes to the same pipe.
    os.write(1, f"rank {rank} pid {os.getpid()}\n".encode())
    oracle.finish()
    dist.destroy_process_group()
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="+", choices=("ddp", "fsdp"))
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--compile")
    parser.add_argument("--oom", type=int, default=-1)
    options = parser.parse_args()
    if options.spawn:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.spawn, os.path.join(folder, "store"), options)
            torch.multiprocessing.spawn(run, arguments, nprocs=options.spawn)
    else:
        run(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), None, options)
