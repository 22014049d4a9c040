"""Keeps an exponential moving average of the weights, and evaluates it at times."""
# issue: none
import copy

import torch
import torch.nn as nn


class Average:
    def __init__(self, model, decay=0.99):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)).cuda()
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    x = torch.randn(512, 768, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    if step % 4 == 3:
        with torch.inference_mode():
            average.model(x)
