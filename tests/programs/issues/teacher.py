"""Distillation: variables keep both models' outputs until the next iteration; a penalty needs second derivatives."""
# issue: none
import torch
import torch.nn as nn


def tower(width):
    return nn.Sequential(nn.Linear(256, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1000))


teacher, student = tower(2048).cuda().requires_grad_(False), tower(512).cuda()
optimizer = torch.optim.AdamW(student.parameters())
for step in range(10):
    x = torch.randn(1024, 256, device="cuda", requires_grad=True)
    targets = teacher(x.detach())
    outputs = student(x)
    slope, = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    loss = (outputs - targets).square().mean() + slope.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
