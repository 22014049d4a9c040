"""Rank 1 runs out of memory in step 2. The other rank waits for it."""

import os

import torch
import torch.distributed

torch.distributed.init_process_group("gloo")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
history = []
for step in range(4):
    history.append(torch.empty(64 << 20, device="cuda"))
    if torch.distributed.get_rank() == 1 and step == 2:
        history.append(torch.empty(1 << 33, device="cuda"))
    torch.distributed.barrier()
