"""Trains a recurrent module, which joins its weights when it moves to the device, and calls that again in forward."""
# issue: none

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(256, 512, 2)

    def forward(self, x):
        self.lstm.flatten_parameters()
        return self.lstm(x)[0]


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(20, 8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
