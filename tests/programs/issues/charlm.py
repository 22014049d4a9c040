"""A recurrent language model that carries its hidden state from chunk to chunk."""
# issue: graph-kept
import torch
import torch.nn as nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 128)

    def forward(self, x, h):
        h = torch.tanh(self.inner(torch.cat([x, h], 1)))
        return self.out(h), h


model = Cell(512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hidden = torch.zeros(512, 512, device="cuda")
for chunk in range(16):
    x = torch.randn(512, 512, device="cuda")
    logits, hidden = model(x, hidden)
    loss = logits.logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)  # issue here
    with torch.no_grad():
        for p in model.parameters():
            p.data -= 0.1 * p.grad
