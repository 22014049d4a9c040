"""Keeps the exceptions of batches that the model rejects: their tracebacks keep the frames and the tensors in them."""
# issue: graph-kept
import torch
import torch.nn as nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(63, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, points):
        scales = [points * 2.0**k for k in range(10)]
        waves = [wave(scaled) for scaled in scales for wave in (torch.sin, torch.cos)]
        out = self.net(torch.cat([points] + waves, -1))  # issue here
        if points.shape[0] % 2:
            raise ValueError("odd number of rays")
        return out


model = Field().cuda()
optimizer = torch.optim.Adam(model.parameters())
errors = []
for step in range(16):
    points = torch.rand(20000 + step % 2, 3).cuda()
    try:
        loss = model(points).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except ValueError as error:
        errors.append(error)
