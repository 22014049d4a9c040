"""One training step with Adam, or --steps of them."""

import argparse

import torch
from mlp import make_batch, make_model

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
steps = parser.parse_args().steps

model = make_model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(steps):
    loss = model(make_batch()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
