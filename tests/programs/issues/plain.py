"""Plain training of a classifier."""
# issue: none
import torch
import torch.nn as nn

net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.Adam(net.parameters())
losses = []
for step in range(14):
    x = torch.randn(2048, 784, device="cuda")
    y = torch.zeros(2048, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
