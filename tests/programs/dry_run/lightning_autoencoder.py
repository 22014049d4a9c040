"""A convolutional variational autoencoder trained by Lightning in bfloat16, with a validation loop."""

import tempfile

import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, SIZE, WIDTH, LATENT = 64, 128, 64, 256


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        widths = [3, WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.BatchNorm2d(o), nn.SiLU()) for i, o in zip(widths, widths[1:])),
                                     nn.Flatten(), nn.Linear(8 * WIDTH * (SIZE // 16) ** 2, 2 * LATENT))
        self.start = nn.Linear(LATENT, 8 * WIDTH * (SIZE // 16) ** 2)
        back = [8 * WIDTH, 4 * WIDTH, 2 * WIDTH, WIDTH, WIDTH]
        self.decoder = nn.Sequential(*(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.SiLU())
                                       for i, o in zip(back, back[1:])), nn.Conv2d(WIDTH, 3, 3, padding=1))

    def loss(self, images):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        rebuilt = self.decoder(self.start(z).view(-1, 8 * WIDTH, SIZE // 16, SIZE // 16))
        return F.mse_loss(rebuilt, images) - 5e-4 * (1 + log_variance - mean ** 2 - log_variance.exp()).mean()

    def training_step(self, batch, index):
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    pl.seed_everything(0)
    train, validation = (DataLoader(TensorDataset(torch.rand(count, 3, SIZE, SIZE)), batch_size=BATCH) for count in (6 * BATCH, 2 * BATCH))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(max_epochs=1, precision="bf16-mixed", accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=1)
        trainer.fit(Autoencoder(), train, validation)
    print("loss", trainer.callback_metrics["train_loss"].item())


if __name__ == "__main__":
    main()
