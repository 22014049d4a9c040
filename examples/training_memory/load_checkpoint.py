"""Loads a checkpoint into the model: onto the GPU, or into host memory with --map-location cpu."""

import argparse
import os
import tempfile

import torch
from mlp import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--map-location", default="cuda")
options = parser.parse_args()

model = make_model()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    torch.save(model.state_dict(), path)
    state = torch.load(path, map_location=options.map_location)
model.load_state_dict(state)
optimizer = torch.optim.Adam(model.parameters())
