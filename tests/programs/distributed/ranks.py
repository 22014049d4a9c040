"""Shared by the programs of this folder: starting a rank, its PyTorch recorder and its network.

torchrun starts a rank with RANK and related variables in its environment; torch.multiprocessing.spawn sets none of
them. Kernels do not run over the simulated CUDA, so no program here reads a result.
"""

import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch"))


def begin(rank, size, store):
    """Starts PyTorch's recorder of this rank and joins the other ranks. Returns the recorder."""
    path = os.environ.get("MEMTRACE_TEST_ORACLE")
    if path:
        os.environ["MEMTRACE_TEST_ORACLE"] = f"{path}.{rank}"
    import oracle

    torch.manual_seed(0)
    torch.cuda.set_device(rank)
    oracle.start()
    if store:
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    else:
        dist.init_process_group("nccl")
    return oracle


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def network(width=512, depth=4):
    return torch.nn.Sequential(*[Block(width) for _ in range(depth)])


def train(model, rank, steps=3, batch=64, width=512):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = torch.empty(batch, width, device=f"cuda:{rank}")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
