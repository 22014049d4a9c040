"""An evaluation of three batches, with or without torch.no_grad()."""

import argparse

import torch
from mlp import make_batch, make_model

parser = argparse.ArgumentParser()
parser.add_argument("--no-grad", action="store_true")
options = parser.parse_args()

model = make_model().eval()
with torch.set_grad_enabled(not options.no_grad):
    for _ in range(3):
        output = model(make_batch())
