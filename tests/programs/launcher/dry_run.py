"""Two training steps with the batch size of the first argument. Prints PyTorch's figures, the memory in use as the driver reports
it, and where the CUDA runtime comes from."""

import json
import sys

import torch
from torch import nn

batch = int(sys.argv[1])
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(batch * 1024, 512, device="cuda")).square().mean().backward()
    optimizer.step()
with open("/proc/self/maps") as maps:
    runtimes = sorted({line.split()[-1] for line in maps if "/libcudart.so" in line})
free, total = torch.cuda.mem_get_info()
figures = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved(), "used": total - free}
print(json.dumps({"name": torch.cuda.get_device_name(), "runtimes": runtimes, **figures}))
