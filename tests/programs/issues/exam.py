"""Trains, then evaluates with gradients; the first batch of the evaluation does not fit."""
# issue: eval-without-no-grad
# env: SIMCUDA_MEMORY=420M
# exit: 1
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(net, size):
    x = torch.randn(size, 512, device="cuda")
    return nn.functional.cross_entropy(net(x), torch.zeros(size, dtype=torch.long, device="cuda"))


def validate(net):
    net.eval()
    return sum(loss_of(net, 12288).item() for _ in range(4))  # issue here


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    loss_of(net, 1024).backward()
    optimizer.step()
    optimizer.zero_grad()
validate(net)
