"""Gradient accumulation over four micro-batches."""
# issue: none
import torch
import torch.nn as nn


class Trainer:
    def __init__(self):
        self.model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def fit(self, steps, micro=4):
        for _ in range(steps):
            for _ in range(micro):
                loss = self.model(torch.randn(16, 128, 256, device="cuda")).square().mean() / micro
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


Trainer().fit(6)
