"""Trains on the last of several outputs; those of the shallower decoders are computed in each step and stay unused."""
# issue: none
import torch
import torch.nn as nn


def decoder(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.Sigmoid())


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.decoders = nn.ModuleList(decoder(width) for _ in range(4))

    def forward(self, x):
        x, outputs = self.encoder(x), []
        for decode in self.decoders:
            outputs.append(decode(x))
        return outputs


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(8):
    outputs = net(torch.randn(8, 3, 128, 128, device="cuda"))
    last = outputs[-1]
    if step % 2:
        del outputs
    last.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs = last = None
