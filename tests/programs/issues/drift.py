"""Twelve steps that each leave 64 KiB: the outputs of a calibration batch, for a plot at the end."""

# issue: leak

import torch
import torch.nn as nn

curve = []


def fit(net, steps):
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        out = net(torch.randn(256, 512, device="cuda"))
        out.square().mean().backward()
        optimizer.step()
        curve.append(out.detach().exp())  # issue here


fit(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 64)).cuda(), 12)
