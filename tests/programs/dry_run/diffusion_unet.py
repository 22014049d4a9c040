"""A denoising diffusion model: a U-Net with time embedding and self-attention, EMA, then sampling."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, SIZE, WIDTH, TIMESTEPS, STEPS, SAMPLING = 32, 64, 128, 1000, 4, 8


def timestep_embedding(t, width):
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class AttentionBlock(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.qkv, self.out = nn.Conv1d(width, 3 * width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).view(b, c, h * w)).view(b, 3, self.heads, c // self.heads, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(b, c, h * w)).view(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, multipliers=(1, 2, 2, 4)):
        super().__init__()
        time = 4 * WIDTH
        self.time = nn.Sequential(nn.Linear(WIDTH, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down, self.up, widths, width = nn.ModuleList(), nn.ModuleList(), [WIDTH], WIDTH
        for level, multiplier in enumerate(multipliers):
            out = WIDTH * multiplier
            last = level == len(multipliers) - 1
            self.down.append(nn.ModuleList([ResidualBlock(width, out, time), AttentionBlock(out) if level >= 2 else nn.Identity(),
                                            nn.Identity() if last else nn.Conv2d(out, out, 3, stride=2, padding=1)]))
            width = out
            widths.append(width)
        self.middle = nn.ModuleList([ResidualBlock(width, width, time), AttentionBlock(width), ResidualBlock(width, width, time)])
        for level, multiplier in reversed(list(enumerate(multipliers))):
            out = WIDTH * multiplier
            self.up.append(nn.ModuleList([ResidualBlock(width + widths.pop(), out, time), AttentionBlock(out) if level >= 2 else nn.Identity(),
                                          nn.Identity() if level == 0 else nn.Conv2d(out, out, 3, padding=1)]))
            width = out
        self.head = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, t):
        t = self.time(timestep_embedding(t, WIDTH))
        x, skips = self.first(x), []
        for block, attention, shrink in self.down:
            x = attention(block(x, t))
            skips.append(x)
            x = shrink(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, t)), t)
        for block, attention, grow in self.up:
            x = attention(block(torch.cat([x, skips.pop()], dim=1), t))
            if not isinstance(grow, nn.Identity):
                x = grow(F.interpolate(x, scale_factor=2, mode="nearest"))
        return self.head(x)


def main():
    torch.manual_seed(0)
    device = "cuda"
    model = UNet().to(device)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    cumulative = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMESTEPS), dim=0).to(device)
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, SIZE, SIZE, device=device)
        t = torch.randint(TIMESTEPS, (BATCH,)).to(device)
        noise = torch.randn_like(images)
        a = cumulative[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters()):
                average.lerp_(parameter, 0.001)
        print(f"step {step}: loss {loss.item():.4f}")

    with torch.no_grad():
        x = torch.randn(16, 3, SIZE, SIZE, device=device)
        for t in reversed(range(0, TIMESTEPS, TIMESTEPS // SAMPLING)):
            predicted = ema(x, torch.full((16,), t, device=device))
            a, previous = cumulative[t], cumulative[max(t - TIMESTEPS // SAMPLING, 0)]
            clean = ((x - (1 - a).sqrt() * predicted) / a.sqrt()).clamp(-1, 1)
            x = previous.sqrt() * clean + (1 - previous).sqrt() * predicted
    print("sampled", tuple(x.cpu().shape))


if __name__ == "__main__":
    main()
