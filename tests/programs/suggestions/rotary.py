"""Trains a model whose layers each compute their own tables of rotary positions, for the longest sequence."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("share-buffers", "smaller-batches", "checkpoint-layers", "offload-activations", *changes.ADAM)
WIDTH, LONGEST, LAYERS = 512, 32768, 8


def table():
    angles = torch.arange(LONGEST)[:, None] * torch.logspace(0, -4, WIDTH // 2)[None]
    return torch.cat((angles, angles), -1)


class Layer(nn.Module):
    def __init__(self, shared=None):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shared is None:
            self.register_buffer("cos_cached", table().cos(), persistent=False)
        else:
            self.cos_cached = shared

    def forward(self, x):
        return x + self.out(self.query(x) * self.cos_cached[: x.shape[1]])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        shared = None
        if "share-buffers" in CHANGES:
            shared = table().cos().cuda()
        self.layers = nn.ModuleList(Layer(shared) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().cuda()
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
size, accumulate = CHANGES.batches(4)
for step in range(4):
    for _ in range(accumulate):
        x = torch.randn(size, 512, WIDTH, device="cuda")
        with CHANGES.around_forward():
            loss = model(x).square().mean() / accumulate
        loss.backward()
        del x, loss
    optimizer.step()
    optimizer.zero_grad()
changes.done()
