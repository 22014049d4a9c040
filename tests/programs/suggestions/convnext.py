"""Trains a ConvNeXt: stages in a ModuleList, each with its own blocks, of very different sizes."""
import changes
import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


class Stage(nn.Module):
    def __init__(self, inputs, dim, depth):
        super().__init__()
        self.downsample = nn.Sequential(LayerNorm2d(inputs), nn.Conv2d(inputs, dim, 2, 2)) if inputs else nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])

    def forward(self, x):
        return self.blocks(self.downsample(x))


class ConvNeXt(nn.Module):
    def __init__(self, dims=(64, 128, 256, 512), depths=(2, 2, 6, 2)):
        super().__init__()
        self.stages = nn.Sequential(*[Stage(i, d, n) for i, d, n in zip((0, *dims), dims, depths)])
        self.norm, self.head = nn.LayerNorm(dims[-1]), nn.Linear(dims[-1], 100)

    def forward(self, x):
        return self.head(self.norm(self.stages(x).mean((-2, -1))))


def train(model, optimizer, batch, accumulate):
    model.train()
    for _ in range(3):
        for _ in range(accumulate):
            x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=CHANGES.dtype)
            y = torch.randint(100, (batch,), device="cuda")
            with CHANGES.around_forward():
                loss = cross_entropy(model(x), y, label_smoothing=0.1)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


model = ConvNeXt().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("stages.*.blocks.*", model)
train(model, CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-3), *CHANGES.batches(24))
changes.done()
