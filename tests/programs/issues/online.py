# issue: leak
"""Trains a classifier for some steps, and then answers requests. Each answer stays in a log on the device."""

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def fit(steps):
    for _ in range(steps):
        inputs = torch.randn(64, 512, device="cuda")
        labels = torch.randint(0, 4096, (64,), device="cuda")
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Service:
    def __init__(self):
        self.log = []

    @torch.no_grad()
    def answer(self, inputs):
        scores = model(inputs).softmax(dim=1)  # issue here
        self.log.append(scores)
        return scores.argmax(dim=1).tolist()


def main():
    fit(12)
    model.eval()
    service = Service()
    for _ in range(150):
        service.answer(torch.randn(16, 512, device="cuda"))


main()
