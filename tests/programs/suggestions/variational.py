"""Trains a variational autoencoder with a trainer object that reconstructs a larger batch after training."""
from itertools import pairwise
import changes
import torch
from torch import nn

TRAINING = ("smaller-batches", "checkpoint-layers", "set-to-none", "bfloat16-model", *changes.ADAM, *changes.FORWARD)
CHANGES = changes.parse(*TRAINING, "no-grad", "smaller-evaluation-batch")


class Scale(nn.Sequential):
    def __init__(self, conv, inputs, outputs):
        super().__init__(conv(inputs, outputs, 4, 2, 1), nn.GroupNorm(8, outputs), nn.LeakyReLU(0.2))


class VAE(nn.Module):
    def __init__(self, latent=256):
        super().__init__()
        self.encoder = nn.Sequential(*[Scale(nn.Conv2d, *pair) for pair in pairwise((3, 64, 128, 256, 512))])
        self.to_mean, self.to_log_variance = nn.Linear(512 * 64, latent), nn.Linear(512 * 64, latent)
        self.from_latent = nn.Linear(latent, 512 * 64)
        self.decoder = nn.Sequential(*[Scale(nn.ConvTranspose2d, *pair) for pair in pairwise((512, 256, 128, 64, 32))])
        self.to_pixels = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, images):
        hidden = self.encoder(images).flatten(1)
        mean, log_variance = self.to_mean(hidden), self.to_log_variance(hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.to_pixels(self.decoder(self.from_latent(latent).unflatten(1, (512, 8, 8)))), mean, log_variance


class Trainer:
    def __init__(self, model, batch_size):
        self.model, (self.batch, self.accumulate) = model, CHANGES.batches(batch_size)
        self.optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=2e-4, betas=(0.5, 0.999))

    def images(self, count):
        return torch.rand(count, 3, 128, 128, device="cuda", dtype=CHANGES.dtype)

    def loss(self, images):
        logits, mean, log_variance = self.model(images)
        pixels = nn.functional.binary_cross_entropy_with_logits(logits, images)
        return pixels - 0.01 * (1 + log_variance - mean.square() - log_variance.exp()).mean()

    def fit(self, steps):
        for number in range(steps * self.accumulate):
            with CHANGES.around_forward():
                loss = self.loss(self.images(self.batch))
            if number % self.accumulate == 0:
                self.optimizer.zero_grad()
            (loss / self.accumulate).backward()
            if (number + 1) % self.accumulate == 0:
                self.optimizer.step()
                if "set-to-none" in CHANGES:
                    self.optimizer.zero_grad(set_to_none=True)

    def error(self, examples=96):
        parts, total = (4 if "smaller-evaluation-batch" in CHANGES else 1), 0
        with torch.set_grad_enabled("no-grad" not in CHANGES):
            for _ in range(parts):
                total += self.loss(self.images(examples // parts)).detach() / parts
        return total


vae = VAE().to("cuda", CHANGES.dtype)
CHANGES.checkpoint("*coder.*", vae)
trainer = Trainer(vae, 48)
trainer.fit(steps=5)
trainer.error()
changes.done()
