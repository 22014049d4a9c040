"""Training whose peak a suggestion of the report can lower. `after` applies it, with the same seed.

    python actions.py step|batch [after]    step: the peak is in the optimizer's step; batch: in the backward pass
"""

import sys

import torch
import torch.nn as nn

WHAT, AFTER = sys.argv[1], "after" in sys.argv[2:]

if WHAT == "step":
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(40)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=AFTER or None)
    batch, accumulate = 8, 1
else:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, accumulate = (8192, 2) if AFTER else (16384, 1)
width = next(model.parameters()).shape[1]
for _ in range(3):
    for _ in range(accumulate):
        x = torch.randn(batch, width, device="cuda")
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated())
