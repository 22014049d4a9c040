"""Ranks of DDP with batches of different sizes: rank R gets R + 1 times the batch of rank 0.

uneven.py [--stray]     --stray: each rank allocates on GPU 0 before it selects its own
"""

import os
import sys

import torch
import torch.distributed as dist

import ranks


def main(options):
    rank = int(os.environ["LOCAL_RANK"])
    if "--stray" in options:
        stray = torch.zeros(3 << 20, dtype=torch.uint8).cuda()
    oracle = ranks.begin(rank, int(os.environ["WORLD_SIZE"]), None)
    model = torch.nn.parallel.DistributedDataParallel(ranks.network().cuda(rank), device_ids=[rank], init_sync=False)
    ranks.train(model, rank, batch=2048 * (rank + 1))
    dist.barrier()
    oracle.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
