"""Trains a small network for three steps and ends in the way that its argument names."""

import ctypes
import os
import resource
import signal
import sys

import torch

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
how = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())


def step():
    torch.nn.functional.mse_loss(model(torch.empty(64, 256, device="cuda")), torch.empty(64, 10, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):
    step()
if how == "loop":
    print(os.getpid(), flush=True)
    while True:
        step()
        kept = [torch.empty(3 << 20, device="cuda") for _ in range(4)]
        del kept
        torch.cuda.empty_cache()
elif how == "exception":
    raise RuntimeError("nobody handles this")
elif how == "oom":
    kept = [torch.empty(1 << 20, device="cuda") for _ in range(3)]
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
elif how == "_exit":
    os._exit(3)
elif how == "exit":
    sys.exit(4)
elif how == "abort":
    os.abort()
elif how == "segv":
    ctypes.string_at(0)
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
