"""LBFGS whose history is not yet full when the program ends."""

# issue: none

import torch
import torch.nn as nn

net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)).cuda()
# Negative tolerances: on the simulated GPU every comparison reads garbage.
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2, history_size=100, tolerance_grad=-1, tolerance_change=-1)
x = torch.randn(512, 256, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = (net(x) - x).square().mean()
    loss.backward()
    return loss


for _ in range(12):
    optimizer.step(closure)
