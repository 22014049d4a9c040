"""Trains a UNet for segmentation: each decoder stage takes the output of an encoder stage through a skip connection."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.layers(x)


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256, 512), classes=21):
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths[:-2]), widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConv(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(DoubleConv(2 * w, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.out(x)


net = UNet().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("join.*", net)
optimizer = CHANGES.optimizer(torch.optim.Adam, net, lr=1e-3)
size, accumulate = CHANGES.batches(8)
for epoch in range(3):
    for _ in range(accumulate):
        image = torch.randn(size, 3, 256, 256, device="cuda").to(CHANGES.dtype)
        mask = torch.zeros(size, 256, 256, dtype=torch.long, device="cuda")
        with CHANGES.around_forward():
            loss = F.cross_entropy(net(image), mask)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
