"""A new head for each task joins the optimizer, which keeps the earlier heads with their state."""
# issue: leak
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 2000)

    def forward(self, x):
        return self.head(self.body(x))


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for task in range(7):
    for _ in range(3):
        x = torch.randn(64, 512, device="cuda")
        y = torch.randint(0, 2000, (64,), device="cuda")
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.head = nn.Linear(512, 2000).cuda()  # issue here
    optimizer.add_param_group({"params": net.head.parameters()})
