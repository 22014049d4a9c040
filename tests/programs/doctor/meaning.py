"""All that gives memory a purpose: model, optimizer, ranges of both kinds, a cycle that only the collector frees."""

import gc

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    with torch.profiler.record_function("forward of mine"):
        loss = model(torch.ones(64, 256, device="cuda")).sum()
    torch.cuda.nvtx.range_push("backward of mine")
    loss.backward()
    torch.cuda.nvtx.range_pop()
    optimizer.step()
    optimizer.zero_grad()
cycle = [torch.ones(1024, 1024, device="cuda")]
cycle.append(cycle)
del cycle
gc.collect()
torch.ones(8, device="cuda")
