"""Backward under anomaly mode, where PyTorch 2.11 records the forward call with each event: tests `forward_frames`."""

import torch
import torch.nn as nn
import oracle


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + torch.zeros_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        x = self.conv(x).relu()
        x = Scale.apply(x)
        x = self.fc(
            x.mean(
                (2, 3)
            )
        )
        return x


oracle.start()
with torch.autograd.set_detect_anomaly(True, check_nan=False):
    net = Net().cuda()
    for _ in range(2):
        loss = net(torch.randn(2, 3, 16, 16, device="cuda")).sum()
        loss.backward()
oracle.finish()
