"""Trains with DistributedDataParallel on two GPUs; rank 0 prints its peak."""
# GPUs: 2
import os
import pickle
import socket
import time

import changes
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch._C._distributed_c10d import _dump_nccl_trace
from torch.nn.parallel import DistributedDataParallel as DDP

CHANGES = changes.parse("gradients-in-buckets", "adapters", "smaller-batches", "checkpoint-layers", "single-tensor-step", "fused-step", "eight-bit-moments",
                        "bfloat16-model", *changes.FORWARD)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def wait_until_nccl_frees():
    """Waits until NCCL's watchdog has let go of the buckets of all collectives. Else when it does decides the peak of the
    next step, in which DistributedDataParallel replaces its buckets (pytorch/pytorch#150398)."""
    torch.cuda.synchronize()
    while any(not entry["retired"] for entry in pickle.loads(_dump_nccl_trace())["entries"]):
        time.sleep(0.01)


def train(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    model = nn.Sequential(nn.Embedding(8000, 768), *(Layer(768) for _ in range(10)), nn.Linear(768, 100)).cuda(rank).to(CHANGES.dtype)
    CHANGES.adapt(model)
    ddp = DDP(model, device_ids=[rank], gradient_as_bucket_view="gradients-in-buckets" in CHANGES)
    CHANGES.checkpoint("[1-9]*", ddp)
    optimizer = CHANGES.optimizer(torch.optim.AdamW, ddp, lr=1e-4)
    batch, accumulate = CHANGES.batches(8)
    for _ in range(4):
        for part in range(accumulate):
            ids, labels = torch.randint(8000, (batch, 256), device="cuda"), torch.randint(100, (batch * 256,), device="cuda")
            with CHANGES.around_forward():
                loss = nn.functional.cross_entropy(ddp(ids).flatten(0, 1), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_until_nccl_frees()
    if rank == 0:
        changes.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(2, port), nprocs=2)
