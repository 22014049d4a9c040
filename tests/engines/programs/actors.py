"""actors.py: two Ray actors that are the ranks of a group. Prints PyTorch's peak in each, as JSON. No line is for memtrace."""

import json
import os

import ray
import torch

MIB = 1 << 20


@ray.remote(num_gpus=1)
class Worker:
    def __init__(self, rank):
        self.rank = rank

    def address(self):
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def train(self, address):
        torch.distributed.init_process_group("gloo", init_method=address, rank=self.rank, world_size=2)
        kept = torch.empty((self.rank + 1) * 3 * MIB, dtype=torch.uint8, device="cuda")
        torch.distributed.barrier()
        del kept
        torch.distributed.destroy_process_group()
        return {"rank": self.rank, "pid": os.getpid(), "peak": torch.cuda.max_memory_allocated(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}


@ray.remote(num_gpus=1)
def task():
    """A task: its process belongs to no group."""
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    return {"rank": None, "pid": os.getpid(), "peak": torch.cuda.max_memory_allocated()}


address = os.environ.get("RAY_ADDRESS")
ray.init(**({} if address else {"num_cpus": 3, "num_gpus": 3, "include_dashboard": False}))
workers = [Worker.remote(rank) for rank in range(2)]
address = ray.get(workers[0].address.remote())
print(json.dumps(ray.get([*[worker.train.remote(address) for worker in workers], task.remote()])))
ray.shutdown()
