"""Trains a little and then scores a data set: all scores stay on the device until the memory is full."""

# issue: leak
# env: SIMCUDA_MEMORY=400M
# exit: 1

import torch
import torch.nn as nn

net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(8, 3, 64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
scores = []
with torch.no_grad():
    for _ in range(60):
        scores.append(net(torch.randn(32, 3, 128, 128, device="cuda")))  # issue here
torch.cat(scores).mean().item()
