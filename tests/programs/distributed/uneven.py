"""Ranks of DDP with batches of different sizes: rank R gets R + 1 times the batch of rank 0.

uneven.py [--stray | --context | --spawn]     --stray: each rank allocates on GPU 0 before it selects its own
                                    --context: each rank creates a context on GPU 0 and allocates nothing there
                                    --spawn: this process starts two ranks; otherwise torchrun starts them
"""

import os
import socket
import subprocess
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


def spawn():
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    return max(one.wait() for one in started)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(spawn() if "--spawn" in sys.argv else main(sys.argv[1:]))
