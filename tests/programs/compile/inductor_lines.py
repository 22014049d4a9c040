"""Trains a small model on the CPU with torch.compile's inductor, and writes inductor's map from lines to origins.

inductor_lines.py FILE: {file: {line: [[name, file, line], ...]}} as JSON, innermost first, of all lines that have an origin.
"""

import json
import sys

import torch
import torch.nn as nn
from torch._inductor.codecache import PyCodeCache


def activation(x):
    return torch.sin(x) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x):
        h = activation(self.first(x))
        return self.last(h).square().sum()


def train():
    model = torch.compile(Net())
    for _ in range(2):
        model(torch.ones(32, 64)).backward()


def inductor_lines(path):
    with open(path) as file:
        lines = range(1, len(file.readlines()) + 1)
    asked = ((line, PyCodeCache.stack_frames_for_code(path, line)) for line in lines)
    return {line: [[f["name"], f["filename"], f["line"]] for f in frames] for line, frames in asked if frames}


if __name__ == "__main__":
    train()
    with open(sys.argv[1], "w") as file:
        json.dump({path: inductor_lines(path) for path in PyCodeCache.linemaps}, file)
