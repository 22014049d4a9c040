"""Training on several hosts: each rank writes PyTorch's own peaks, by phase, into OUT/RANK.json.

hosts.py OUT [--backend gloo]    under torchrun, with one device for each rank of a host

The last rank keeps one more tensor from each step, so that it has the highest peak. Kernels do not run over the simulated
CUDA, so no result is read.
"""

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--backend", default="gloo")
options = parser.parse_args()

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group(options.backend)
rank, size = dist.get_rank(), dist.get_world_size()
peaks = {}


def measured(phase, function):
    """Calls the function and takes the peak of allocated bytes meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    result = function()
    peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
    return result


model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)) for _ in range(4)])
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
history = []
# If a thread of Gloo drops the last reference to a tensor while Python ends, PyTorch 2.11 aborts ("terminate called
# without an active exception"). So one tensor serves all steps, and the program waits before its end.
waiting = torch.zeros(1)
for step in range(3):
    batch = torch.empty(64, 512, device="cuda")
    loss = measured("forward", lambda: model(batch).sum())
    measured("backward", loss.backward)
    measured("optimizer", optimizer.step)
    optimizer.zero_grad()
    if rank == size - 1:
        history.append(torch.empty(8 << 20, dtype=torch.uint8, device="cuda"))
    # Each step waits for all ranks.
    dist.all_reduce(waiting) if options.backend == "gloo" else dist.barrier()
statistics = torch.cuda.memory_stats()
peaks["any"] = max(*peaks.values(), statistics["allocated_bytes.all.peak"])
with open(os.path.join(options.out, f"{rank}.json"), "w") as file:
    json.dump({"rank": rank, "size": size, "host": socket.gethostname(), "pid": os.getpid(), "peaks": peaks,
               "reserved": statistics["reserved_bytes.all.peak"]}, file)
dist.destroy_process_group()
time.sleep(1)
