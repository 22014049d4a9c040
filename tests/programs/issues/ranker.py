"""Trains a ranker as code before PyTorch 2.0 did: gradients are filled with zeros."""
# issue: gradients-not-cleared
import torch
import torch.nn as nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(1536, 1536) for _ in range(4))
        self.score = nn.Linear(1536, 1)

    def forward(self, x):
        for layer in self.body:
            x = torch.relu(layer(x)) + x
        return self.score(x).squeeze(-1)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)  # issue here
        x = torch.randn(1024, 1536, device="cuda")
        better, worse = model(x), model(x.flip(0))
        loss = torch.relu(1 - better + worse).mean()
        loss.backward()  # issue here
        optimizer.step()


ranker = Ranker().cuda()
train(ranker, torch.optim.AdamW(ranker.parameters()), 8)
