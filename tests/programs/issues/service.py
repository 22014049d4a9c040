"""Answers requests with a model whose parameters still require gradients."""
# issue: eval-without-no-grad
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.mid = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = F.gelu(self.mid(x)) + x
        return F.gelu(self.last(x)).mean((2, 3))


def serve(model, requests):
    for request in requests:
        batch = request.cuda()
        answer = model(batch)  # issue here
        yield answer.argmax(1).cpu()


model = Tower().cuda().eval()
for answer in serve(model, (torch.randn(8, 3, 128, 128) for _ in range(8))):
    assert answer.shape == (8,)
