"""A classifier over tokens, trained by a function that takes everything it needs."""
# issue: gradients-cleared-late
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(512) for _ in range(8))
        self.classifier = nn.Linear(512, 100)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean(1))


def run(model, optimizer, batches, criterion):
    for tokens, labels in batches:
        loss = criterion(model(tokens), labels)
        model.zero_grad()  # issue here
        loss.backward()
        optimizer.step()


def batches(count):
    for _ in range(count):
        yield torch.randn(16, 32, 512, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")


net = Net().cuda()
run(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), batches(6), F.cross_entropy)
