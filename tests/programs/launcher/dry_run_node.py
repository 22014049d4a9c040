"""Tensor parallelism and FSDP2 on a mesh of all devices of a node: torchrun --nproc-per-node N dry_run_node.py.

Each rank prints its peak of allocated memory and that of the same model without parallelism, in bytes.
"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, BATCH = 1024, 4, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(BATCH, WIDTH, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer
    torch.cuda.reset_peak_memory_stats()
    return peak


def parallel_model(ranks):
    mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).cuda()
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def check_exchange(rank, ranks):
    """Ranks get what the others sent, and wait for each other."""
    names = [None] * ranks
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {r}" for r in range(ranks)], names
    box = [{"from": rank}]
    dist.broadcast_object_list(box, src=1)
    assert box == [{"from": 1}], box
    flags = torch.tensor([rank, 1]).cuda()
    dist.all_reduce(flags)
    assert flags.tolist() == [ranks * (ranks - 1) // 2, ranks], flags
    marker = "written-by-rank-0"
    if rank == 0:
        time.sleep(0.5)
        open(marker, "w").close()
    dist.barrier()
    assert os.path.exists(marker), "the barrier waits"
    sent, received = torch.arange(rank * 10, rank * 10 + ranks).cuda(), torch.zeros(ranks, dtype=torch.int64).cuda()
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [r * 10 + rank for r in range(ranks)], received


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # With a device, PyTorch splits communicators instead of making new ones.
    dist.init_process_group("nccl", device_id=device)
    check_exchange(rank, ranks)
    whole = train(nn.Sequential(*[Block() for _ in range(LAYERS)]).cuda())
    sharded = train(parallel_model(ranks))
    can_access_peers = all(torch.cuda.can_device_access_peer(rank, peer) for peer in range(ranks) if peer != rank)
    result = {"rank": rank, "whole": whole, "sharded": sharded, "can_access_peers": can_access_peers}
    # In one write, because the ranks share the output.
    os.write(1, (json.dumps(result) + "\n").encode())
    dist.destroy_process_group()
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()


if __name__ == "__main__":
    main()
