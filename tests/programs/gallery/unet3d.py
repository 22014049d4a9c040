"""A 3D U-Net as nnU-Net plans it for patches of 128 x 128 x 128: deep supervision, Dice and cross-entropy, float16 with a GradScaler."""

import torch
import torch.nn as nn

BATCH, PATCH, CHANNELS, CLASSES, STEPS = 2, 128, (32, 64, 128, 256, 320, 320), 4, 3


def block(inputs, outputs, stride=1):
    layers = []
    for place in range(2):
        layers += [nn.Conv3d(inputs if place == 0 else outputs, outputs, 3, stride if place == 0 else 1, padding=1),
                   nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01, inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (1, *CHANNELS)
        self.down = nn.ModuleList(block(a, b, 1 if place == 0 else 2) for place, (a, b) in enumerate(zip(widths, widths[1:])))
        upward = list(zip(CHANNELS[::-1], CHANNELS[-2::-1]))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in upward)
        self.merge = nn.ModuleList(block(2 * b, b) for _, b in upward)
        self.heads = nn.ModuleList(nn.Conv3d(b, CLASSES, 1) for _, b in upward)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        results = []
        kept.pop()
        for up, merge, head in zip(self.up, self.merge, self.heads):
            x = merge(torch.cat([up(x), kept.pop()], dim=1))
            results.append(head(x))
        return results[::-1]


def dice(logits, labels):
    shares = logits.softmax(1)
    truth = torch.zeros_like(shares).scatter_(1, labels, 1)
    axes = (2, 3, 4)
    return 1 - ((2 * (shares * truth).sum(axes) + 1e-5) / (shares.sum(axes) + truth.sum(axes) + 1e-5)).mean()


def main():
    torch.manual_seed(0)
    model = UNet().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        volumes = torch.randn(BATCH, 1, *(PATCH, ) * 3).to("cuda")
        labels = torch.randint(CLASSES, (BATCH, 1, *(PATCH, ) * 3)).to("cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = 0
            for level, logits in enumerate(model(volumes)):
                target = labels[:, :, ::2**level, ::2**level, ::2**level]
                loss = loss + 0.5**level * (nn.functional.cross_entropy(logits, target[:, 0]) + dice(logits, target))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
