"""ViT-L/16 of timm, trained by Lightning's Trainer in bfloat16."""

import pytorch_lightning as lightning
import timm
import torch

BATCH, STEPS = 64, 3


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model("vit_large_patch16_224", num_classes=1000)

    def training_step(self, batch, _):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main():
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH, 3, 224, 224), torch.randint(1000, (STEPS * BATCH, )))
    trainer = lightning.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=STEPS, logger=False, enable_checkpointing=False,
                                enable_model_summary=False)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=BATCH))


if __name__ == "__main__":
    main()
