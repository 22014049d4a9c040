"""A table of positions that the first iterations fill; memory use is constant afterwards."""
# issue: none
import torch
import torch.nn as nn


class Positions:
    def __init__(self, width):
        self.width, self.known = width, {}

    def __call__(self, length):
        if length not in self.known:
            self.known[length] = torch.randn(length, self.width, device="cuda")
        return self.known[length]


positions = Positions(512)
net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(30):
    length = 512 + 64 * (step % 7)
    loss = net(torch.randn(length, 512, device="cuda") + positions(length)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
