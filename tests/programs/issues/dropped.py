"""Checks the model on larger batches between epochs; the second of them does not fit beside the graph of the first."""
# issue: eval-without-no-grad
# env: SIMCUDA_MEMORY=420M
# exit: 1
import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rate(net, sizes):
    right = 0
    for size in sizes:
        right += int((net(torch.randn(size, 512, device="cuda")).argmax(1) == 0).sum())  # issue here
    return right


net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(4):
        loss = nn.functional.cross_entropy(net(torch.randn(512, 512, device="cuda")), torch.zeros(512, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rate(net, [2048, 10240])
