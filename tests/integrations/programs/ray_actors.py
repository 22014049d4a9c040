"""Two Ray actors that are the ranks of a job. Prints PyTorch's own peak of each rank as JSON, with its process id."""

import json
import os
import socket

import ray


@ray.remote
class Rank:
    def __init__(self, rank, size, port):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank = rank

    def train(self):
        import torch

        kept = [torch.empty((self.rank + 1) << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        return [self.rank, os.getpid(), torch.cuda.max_memory_allocated(), len(kept)]


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ranks = [Rank.remote(rank, 2, port) for rank in range(2)]
print(json.dumps([found[:3] for found in ray.get([rank.train.remote() for rank in ranks])]), flush=True)
ray.shutdown()
