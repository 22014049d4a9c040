"""Trains a mixer with micro-batches as GPipe schedules them: all forward passes of a step, then all backward passes."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("backward-each", "checkpoint-layers", "offload-activations", *changes.ADAM)
WIDTH, MICRO_BATCHES = 768, 4


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*[Mixer() for _ in range(5)]).cuda()
CHANGES.checkpoint("*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)


def loss_of(batch):
    with CHANGES.around_forward():
        return nn.functional.mse_loss(model(batch), batch) / MICRO_BATCHES


for step in range(5):
    losses = []
    for micro_batch in range(MICRO_BATCHES):
        loss = loss_of(torch.randn(2048, WIDTH, device="cuda"))
        if "backward-each" in CHANGES:
            loss.backward()
        else:
            losses.append(loss)
        del loss
    while losses:
        losses.pop(0).backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
