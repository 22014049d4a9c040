"""Resumes a training: the checkpoint's weights are copied into the model and stay allocated beside it."""
# issue: checkpoint-kept
import os
import tempfile

import torch
import torch.nn as nn


def network():
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


path = os.path.join(tempfile.mkdtemp(), "weights.pt")
torch.save({"model": network().state_dict(), "epoch": 3}, path)
checkpoint = torch.load(path, map_location="cuda")  # issue here
model = network().to("cuda")
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(checkpoint["epoch"], 8):
    loss = model(torch.randn(128, 1024, device="cuda")).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
os.remove(path)
