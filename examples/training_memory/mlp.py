"""The model of these programs: four linear layers of 64 MiB, each followed by an activation function."""

import torch
import torch.nn as nn

WIDTH, LAYERS, BATCH = 4096, 4, 4096


def make_model():
    layers = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()]
    return nn.Sequential(*layers).cuda()


def make_batch():
    return torch.zeros(BATCH, WIDTH).cuda()
