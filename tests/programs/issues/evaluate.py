"""Trains and evaluates in turns, the evaluation without gradients; keeps the numbers of each epoch on the device."""
# issue: none
import torch
import torch.nn as nn

net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def evaluate():
    total = torch.zeros((), device="cuda")
    for _ in range(5):
        out = net(torch.randn(4096, 1024, device="cuda"))
        total += out.mean()
    return total


history = []
for epoch in range(4):
    for _ in range(4):
        loss = net(torch.randn(512, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    history.append(evaluate())
