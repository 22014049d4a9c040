"""Trains on small batches and validates on large ones; the validation forgets torch.no_grad()."""
# limits: 500M 1000M
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("no-grad", "smaller-evaluation-batch", "bfloat16-model", *changes.ADAM)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv2(torch.relu(self.conv1(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.blocks = nn.Sequential(*[Block(64) for _ in range(6)])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def train_epoch(model, optimizer):
    model.train()
    for _ in range(3):
        x, y = torch.randn(8, 3, 96, 96).cuda().to(CHANGES.dtype), torch.randint(10, (8,)).cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def validate(model):
    model.eval()
    batch, parts = (64, 4) if "smaller-evaluation-batch" in CHANGES else (128, 2)
    correct = torch.zeros((), device="cuda")
    for _ in range(parts):
        x, y = torch.randn(batch, 3, 96, 96).cuda().to(CHANGES.dtype), torch.randint(10, (batch,)).cuda()
        correct += (model(x).argmax(1) == y).sum()
    return correct


model = Net().cuda().to(CHANGES.dtype)
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3)
for epoch in range(3):
    train_epoch(model, optimizer)
    if "no-grad" in CHANGES:
        with torch.no_grad():
            validate(model)
    else:
        validate(model)
changes.done()
