"""Trains a critic with a gradient penalty: its gradients have a graph too, which each step frees."""
# issue: none
import torch
import torch.nn as nn

critic = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()
optimizer = torch.optim.Adam(critic.parameters())
for step in range(16):
    x = torch.randn(128, 256, device="cuda", requires_grad=True)
    scores = critic(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    loss = scores.mean() + 10 * (slope.square().sum(1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
