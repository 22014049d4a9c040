"""Loads a checkpoint with map_location="cuda" beside the model on the GPU, then answers requests."""
# limits: 500M 700M
import os
import tempfile

import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("load-to-cpu", "bfloat16-model", "half-the-batch", "smaller-evaluation-batch")


class Classifier(nn.Module):
    def __init__(self, width=2048, depth=24):
        super().__init__()
        self.inputs = nn.Linear(512, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outputs = nn.Linear(width, 100)

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.outputs(x)


def save(path):
    with torch.device("meta"):
        shapes = Classifier().state_dict()
    torch.save({"model": {name: torch.zeros(shape.shape) for name, shape in shapes.items()}, "epoch": 3}, path)


def load(path):
    model = Classifier().to("cuda", CHANGES.dtype)
    checkpoint = torch.load(path, map_location="cpu" if "load-to-cpu" in CHANGES else "cuda")
    model.load_state_dict(checkpoint["model"])
    return model


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.pt")
    save(path)
    model = load(path).eval()
batch, turns = (32, 8) if "half-the-batch" in CHANGES or "smaller-evaluation-batch" in CHANGES else (64, 4)
with torch.no_grad():
    for _ in range(turns):
        answer = model(torch.randn(batch, 512).to("cuda", CHANGES.dtype)).argmax(1).cpu()
changes.done()
