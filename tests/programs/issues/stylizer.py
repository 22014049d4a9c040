"""A two-branch image model; its trainer class clears gradients with the module's zero_grad."""
# issue: gradients-not-cleared
import torch
import torch.nn as nn


class Stylizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.content = nn.Linear(2048, 2048)
        self.style = nn.Linear(2048, 2048)
        self.mix = nn.Linear(4096, 512)

    def forward(self, x):
        return self.mix(torch.cat([torch.relu(self.content(x)), torch.tanh(self.style(x))], 1))


class Session:
    def __init__(self):
        self.net = Stylizer().cuda()
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=1e-3)

    def clear(self):
        self.net.zero_grad(set_to_none=False)  # issue here

    def iterate(self, x):
        loss = self.net(x).square().mean()
        loss.backward()  # issue here
        self.optimizer.step()
        self.clear()


session = Session()
for _ in range(7):
    session.iterate(torch.randn(1024, 2048, device="cuda"))
