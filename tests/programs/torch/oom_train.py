"""Training that runs out of memory in the first step of the optimizer (SIMCUDA_MEMORY=400M): its state does not fit.

    python oom_train.py [catch]    catch: the error, and end well
"""

import sys

import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)], nn.Linear(2048, 1500, bias=False)).cuda()
optimizer = torch.optim.Adam(model.parameters())


def step():
    model(torch.randn(16, 2048, device="cuda")).sum().backward()
    optimizer.step()


try:
    step()
except torch.cuda.OutOfMemoryError:
    if "catch" not in sys.argv[1:]:
        raise
    print("caught")
    model.zero_grad()
    kept = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
