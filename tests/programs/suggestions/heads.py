"""Trains a body with two heads, one of which nobody gave to the optimizer: its gradients stay from step to step."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("freeze-unused", "eight-bit-moments", "single-tensor-step", "fused-step", "set-to-none")
WIDTH, CLASSES = 768, 6000

body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda()
classes, auxiliary = nn.Linear(WIDTH, CLASSES).cuda(), nn.Linear(WIDTH, CLASSES).cuda()
if "freeze-unused" in CHANGES:
    auxiliary.requires_grad_(False)
optimizer = CHANGES.optimizer(torch.optim.Adam, nn.ModuleList([body, classes]), lr=1e-4)
targets = torch.zeros(256, dtype=torch.long, device="cuda")
for step in range(8):
    features = body(torch.randn(256, WIDTH, device="cuda"))
    loss = nn.functional.cross_entropy(classes(features), targets) + nn.functional.cross_entropy(auxiliary(features), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
