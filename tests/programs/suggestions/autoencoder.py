"""Trains a convolutional autoencoder to reconstruct images."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.GroupNorm(8, outputs), nn.SiLU())


def unblock(inputs, outputs):
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU())


encoder = nn.Sequential(nn.Conv2d(3, 48, 3, 1, 1), block(48, 96), block(96, 192), block(192, 384), nn.Conv2d(384, 16, 1))
decoder = nn.Sequential(nn.Conv2d(16, 384, 1), unblock(384, 192), unblock(192, 96), unblock(96, 48), nn.Conv2d(48, 3, 3, 1, 1))
model = nn.Sequential(encoder, decoder).cuda().to(CHANGES.dtype)
CHANGES.checkpoint("1.*", model)
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=2e-4)
batch, accumulate = CHANGES.batches(16)
for step in range(3):
    for _ in range(accumulate):
        images = torch.rand(batch, 3, 256, 256, device="cuda", dtype=CHANGES.dtype)
        with CHANGES.around_forward():
            codes = model[0](images)
            restored = model[1](codes)
            loss = nn.functional.mse_loss(restored, images)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
