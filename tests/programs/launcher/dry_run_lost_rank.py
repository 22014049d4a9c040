"""Two ranks, of which the second leaves. Prints the error that the first gets when it waits for the other."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist


def rank_of_two(rank, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    try:
        dist.barrier()
    except RuntimeError as error:  # of PyTorch 2.15; that of earlier releases is a DistBackendError, which is one
        print(error, flush=True)
        os._exit(0)


if len(sys.argv) > 1:
    rank_of_two(int(sys.argv[1]), sys.argv[2])
else:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), os.path.abspath("store")]) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
