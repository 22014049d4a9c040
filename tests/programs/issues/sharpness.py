"""Probes the sharpness of the loss at a copy of the model; the gradients that have a graph keep each copy alive."""
# issue: leak
import copy

import torch
import torch.nn as nn


def sharpness(model, x):
    probe = copy.deepcopy(model)
    loss = probe(x).square().mean()
    loss.backward(create_graph=True)  # issue here
    return sum(parameter.grad.square().sum() for parameter in probe.parameters()).detach().cpu()


model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
curve = []
for step in range(16):
    x = torch.randn(128, 256, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    curve.append(sharpness(model, x))
