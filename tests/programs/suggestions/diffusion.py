"""Trains the noise predictor of a diffusion model (a UNet with time embeddings and attention) and keeps an average of its weights."""
import copy
import math

import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "scaled-dot-product-attention", *changes.ADAM, *changes.FORWARD)


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class AttentionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv1d(width, 3 * width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).view(b, c, h * w)).chunk(3, dim=1)
        if "scaled-dot-product-attention" in CHANGES:
            a = F.scaled_dot_product_attention(*(s.transpose(1, 2).unsqueeze(1) for s in (q, k, v)))
            a = a.squeeze(1).transpose(1, 2)
        else:
            weights = torch.softmax(torch.einsum("bcs,bct->bst", q, k) / math.sqrt(c), dim=-1)
            a = torch.einsum("bst,bct->bcs", weights, v)
        return x + self.out(a).view(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, base=64, mult=(1, 2, 4), time=256):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(3, base, 3, padding=1)
        widths = [base * m for m in mult]
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        before = base
        for w in widths:
            self.downs.append(nn.ModuleList([ResidualBlock(before, w, time), ResidualBlock(w, w, time), nn.Conv2d(w, w, 3, 2, 1)]))
            before = w
        self.mid1, self.attention, self.mid2 = ResidualBlock(before, before, time), AttentionBlock(before), ResidualBlock(before, before, time)
        for w in reversed(widths):
            self.ups.append(nn.ModuleList([nn.ConvTranspose2d(before, w, 4, 2, 1), ResidualBlock(2 * w, w, time), ResidualBlock(w, w, time)]))
            before = w
        self.out = nn.Sequential(nn.GroupNorm(8, base), nn.SiLU(), nn.Conv2d(base, 3, 3, padding=1))

    def forward(self, x, t):
        frequencies = torch.exp(torch.arange(32, device=x.device) * (-math.log(10000) / 31))
        angles = t[:, None].float() * frequencies
        t = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, skips = self.conv_in(x), []
        for first, second, down in self.downs:
            x = second(first(x, t), t)
            skips.append(x)
            x = down(x)
        x = self.mid2(self.attention(self.mid1(x, t)), t)
        for up, first, second in self.ups:
            x = second(first(torch.cat([up(x), skips.pop()], dim=1), t), t)
        return self.out(x)


model = UNet().cuda()
average = copy.deepcopy(model).requires_grad_(False)
CHANGES.checkpoint("downs.*.0", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
noised = torch.linspace(1, 0, 1000, device="cuda")
batch, accumulate = CHANGES.batches(16)
for step in range(3):
    for _ in range(accumulate):
        images = torch.rand(batch, 3, 128, 128).cuda()
        t = torch.randint(0, 1000, (batch,), device="cuda")
        noise = torch.randn_like(images)
        share = noised[t].view(-1, 1, 1, 1)
        with CHANGES.around_forward():
            loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, t), noise)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, trained in zip(average.parameters(), model.parameters()):
            kept.lerp_(trained, 0.001)
changes.done()
