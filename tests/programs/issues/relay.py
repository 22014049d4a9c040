"""Sixteen small models that are trained in turn, each with its own optimizer."""

# issue: none

import torch

models = [torch.nn.Sequential(torch.nn.Linear(300, 600), torch.nn.ReLU(), torch.nn.Linear(600, 10)).cuda() for _ in range(16)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for _ in range(5):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.randn(32, 300, device="cuda")).square().mean().backward()
        optimizer.step()
