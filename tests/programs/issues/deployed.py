# issue: none
"""Trains for some steps, evaluates, and then answers requests. A cache keeps the latest 32 answers."""

from collections import OrderedDict

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cache = OrderedDict()


def batch():
    return torch.randn(64, 512, device="cuda"), torch.randint(0, 4096, (64,), device="cuda")


def fit(steps):
    model.train()
    for _ in range(steps):
        inputs, labels = batch()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def score(batches):
    model.eval()
    outputs, targets = [], []
    for _ in range(batches):
        inputs, labels = batch()
        outputs.append(model(inputs))
        targets.append(labels)
    return (torch.cat(outputs).argmax(dim=1) == torch.cat(targets)).float().mean().item()


@torch.no_grad()
def answer(key):
    if key not in cache:
        cache[key] = model(torch.randn(16, 512, device="cuda")).softmax(dim=1)
        if len(cache) > 32:
            cache.popitem(last=False)
    return cache[key].argmax(dim=1).tolist()


for epoch in range(3):
    fit(8)
    score(40)
for number in range(200):
    answer(number * 7 % 150)
print(score(60))
