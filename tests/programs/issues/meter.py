"""A training loop with a running mean of the loss; two graphs of three are never run backward."""
# issue: graph-kept
import torch
import torch.nn as nn


class Meter:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)


def main():
    net = nn.Sequential(nn.Conv1d(8, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 8, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    meter = Meter()
    for step in range(12):
        signal = torch.randn(16, 8, 1024, device="cuda")
        optimizer.zero_grad()
        fit = (net(signal) - signal).square().mean()
        smooth = net(signal.roll(1, 2)).diff(dim=2).abs().mean()  # issue here
        fit.backward()
        optimizer.step()
        meter.update(smooth)


main()
