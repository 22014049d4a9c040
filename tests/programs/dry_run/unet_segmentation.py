"""A U-Net for segmentation in float32: cross-entropy and Dice loss, Adam."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, SIZE, CLASSES, WIDTH, STEPS = 8, 384, 4, 48, 4


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        widths = [WIDTH << level for level in range(depth + 1)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.merge = nn.ModuleList(double(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def dice(logits, target):
    probabilities = logits.softmax(dim=1)
    one_hot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).float()
    overlap = (probabilities * one_hot).sum(dim=(2, 3))
    return 1 - (2 * overlap / (probabilities + one_hot).sum(dim=(2, 3)).clamp(min=1e-6)).mean()


def main():
    torch.manual_seed(0)
    model = UNet().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        images = torch.rand(BATCH, 3, SIZE, SIZE, device="cuda")
        masks = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, masks) + dice(logits, masks)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
