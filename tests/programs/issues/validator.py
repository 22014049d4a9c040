"""Trains and validates in turns; the validation builds graphs that are never run backward."""
# issue: eval-without-no-grad
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(1024, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def validate(net):
    net.eval()
    right = 0
    for _ in range(6):
        logits = net(torch.randn(4096, 1024, device="cuda"))  # issue here
        right += (logits.argmax(1) == 0).sum()
    net.train()
    return right


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for epoch in range(3):
    for _ in range(4):
        loss = nn.functional.cross_entropy(net(torch.randn(512, 1024, device="cuda")), torch.zeros(512, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    validate(net)
