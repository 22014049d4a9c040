"""Trains a two-tower recommender and keeps each batch's scores for a histogram that is never drawn."""
# issue: leak
import torch
import torch.nn as nn


class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 512))
        self.item = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 512))

    def forward(self, user, item):
        return self.user(user) @ self.item(item).T


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.scores = []

    def step(self, user, item):
        self.optimizer.zero_grad()
        logits = self.model(user, item)
        loss = nn.functional.cross_entropy(logits, torch.arange(len(user), device=user.device))
        loss.backward()
        self.optimizer.step()
        self.scores.append(logits.detach().sigmoid())  # issue here
        return loss.item()


trainer = Trainer(Towers(1024).cuda())
for i in range(24):
    trainer.step(torch.randn(768, 256, device="cuda"), torch.randn(768, 256, device="cuda"))
print(len(trainer.scores))
