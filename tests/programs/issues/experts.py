"""Trains a mixture of experts; the routers' logits of all layers are returned, and the loss does not use them."""
# issue: none
import torch
import torch.nn as nn


class Mixture(nn.Module):
    def __init__(self, width, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        x = self.norm(x)
        logits = self.router(x)
        out = sum(expert(x) for expert in self.experts)
        return x + torch.relu(out), logits


class Model(nn.Module):
    def __init__(self, width=512, depth=4):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(Mixture(width) for _ in range(depth))
        self.head = nn.Linear(width, 64)

    def forward(self, x):
        x, routed = self.stem(x), []
        for layer in self.layers:
            x, logits = layer(x)
            routed.append(logits)
        return self.head(x), routed


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(2048, 64, device="cuda")
    prediction, routed = model(x)
    routed = None
    loss = nn.functional.mse_loss(prediction, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
