"""Resumes from a checkpoint that is loaded on the CPU and freed afterwards."""
# issue: none
import os
import tempfile

import torch
import torch.nn as nn


def network():
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))


def restore(path):
    model = network().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    return model, optimizer


path = os.path.join(tempfile.mkdtemp(), "state.pt")
torch.save({"model": network().state_dict()}, path)
model, optimizer = restore(path)
for _ in range(8):
    loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
os.remove(path)
