"""Loads weights on the device and makes them the model's own parameters."""
# issue: none
import os
import tempfile

import torch
import torch.nn as nn


def network():
    return nn.Sequential(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.Conv2d(64, 128, 5), nn.Flatten(), nn.Linear(128 * 24 * 24, 64))


path = os.path.join(tempfile.mkdtemp(), "weights.pt")
torch.save(network().state_dict(), path)
with torch.device("meta"):
    model = network()
model.load_state_dict(torch.load(path, map_location="cuda"), assign=True)
model.requires_grad_(False).eval()
for _ in range(8):
    model(torch.randn(16, 3, 32, 32, device="cuda")).argmax(1)
os.remove(path)
