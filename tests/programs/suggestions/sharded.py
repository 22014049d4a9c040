"""Trains with FSDP2 on two GPUs; rank 0 prints its peak."""
# GPUs: 2
import os
import socket

import changes
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

CHANGES = changes.parse("smaller-batches", "checkpoint-layers", "offload-activations")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, width=512, depth=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    model = Regressor().cuda()
    CHANGES.checkpoint("blocks.*", model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, accumulate = CHANGES.batches(4096)
    for _ in range(3):
        for _ in range(accumulate):
            x, y = torch.randn(batch, 512, device="cuda"), torch.randn(batch, 16, device="cuda")
            with CHANGES.around_forward():
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        changes.done()
    dist.destroy_process_group()
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(2, port), nprocs=2)
