"""Trains a WaveNet: dilated convolutions with gates, whose skip connections are summed."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "single-tensor-step", "optimizer-in-backward", *changes.FORWARD)


class GatedLayer(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.dilation = dilation
        self.filter, self.gate = (nn.Conv1d(width, width, 2, dilation=dilation) for _ in range(2))
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, 2 * width, 1)

    def forward(self, x):
        padded = F.pad(x, (self.dilation, 0))
        z = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
        return x + self.residual(z), self.skip(z)


class WaveNet(nn.Module):
    def __init__(self, width=64, levels=256):
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.layers = nn.ModuleList(GatedLayer(width, 2 ** (i % 8)) for i in range(16))
        self.end1, self.end2 = nn.Conv1d(2 * width, 2 * width, 1), nn.Conv1d(2 * width, levels, 1)

    def forward(self, samples):
        x, total = self.embed(samples).transpose(1, 2), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.end2(F.relu(self.end1(F.relu(total))))


model = WaveNet().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.RMSprop, model, lr=1e-4)
batch, accumulate = CHANGES.batches(8)
for step in range(3):
    for _ in range(accumulate):
        samples = torch.randint(256, (batch, 8001), device="cuda")
        with CHANGES.around_forward():
            loss = F.cross_entropy(model(samples[:, :-1]), samples[:, 1:])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
