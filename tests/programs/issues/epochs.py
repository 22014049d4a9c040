"""A classifier that is trained for some epochs."""

# issue: gradients-not-cleared

import torch


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.ReLU()) for _ in range(6)])
        self.head = torch.nn.Linear(700, 10)

    def forward(self, x):
        return self.head(self.body(x))


model = Classifier().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = torch.nn.CrossEntropyLoss()
for epoch in range(4):
    optimizer.zero_grad()
    for _ in range(16):
        batch, labels = torch.randn(64, 700, device="cuda"), torch.randint(10, (64,), device="cuda")
        loss_of(model(batch), labels).backward()  # issue here
        optimizer.step()
