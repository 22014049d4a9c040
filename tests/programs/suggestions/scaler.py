"""Trains an MLP-Mixer in float16 with GradScaler."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "single-tensor-step", "fused-step", "eight-bit-moments", "offload-activations")


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class MixerLayer(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), Mlp(patches, 2 * patches)
        self.norm2, self.channels = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, patches=196, width=768, depth=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.Sequential(*[MixerLayer(patches, width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images):
        x = self.layers(self.stem(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


mixer = Mixer().cuda()
CHANGES.checkpoint("layers.*", mixer)
optimizer = CHANGES.optimizer(torch.optim.Adam, mixer, lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
batch, accumulate = CHANGES.batches(64)
for step in range(3):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(accumulate):
        images, labels = torch.randn(batch, 3, 224, 224).cuda(), torch.randint(1000, (batch,)).cuda()
        with torch.autocast(device_type="cuda", dtype=torch.float16), CHANGES.around_forward():
            loss = F.cross_entropy(mixer(images), labels)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
changes.done()
