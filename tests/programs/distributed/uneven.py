"""Ranks of DDP with batches of different sizes: rank R gets R + 1 times the batch of rank 0.

uneven.py [--stray | --context]     --stray: each rank allocates on GPU 0 before it selects its own
                                    --context: each rank creates a context on GPU 0 and allocates nothing there
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
    if "--context" in options:
        torch.cuda.synchronize(0)
    oracle = ranks.begin(rank, int(os.environ["WORLD_SIZE"]), None)
    model = torch.nn.parallel.DistributedDataParallel(ranks.network().cuda(rank), device_ids=[rank], init_sync=False)
    ranks.train(model, rank, batch=2048 * (rank + 1))
    dist.barrier()
    oracle.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
