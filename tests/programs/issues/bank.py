"""Contrastive learning with a bank of all earlier embeddings, which is concatenated anew in each step."""

# issue: leak

import torch
import torch.nn as nn
import torch.nn.functional as F


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
        self.bank = torch.zeros(1, 128, device="cuda")

    def forward(self, view, other):
        query, key = self.encoder(view), self.encoder(other).detach()
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.bank.T], 1)
        self.bank = torch.cat([self.bank, key])  # issue here
        return F.cross_entropy(scores / 0.1, torch.zeros(len(view), dtype=torch.long, device="cuda"))


def train(steps):
    net = Contrast().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(steps):
        loss = net(torch.randn(1024, 256, device="cuda"), torch.randn(1024, 256, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train(20)
