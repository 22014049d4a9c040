"""Masked autoencoder pretraining: ViT-MAE base of transformers, bfloat16 autocast."""

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

BATCH, STEPS = 64, 4


def main():
    torch.manual_seed(0)
    model = ViTMAEForPreTraining(ViTMAEConfig()).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    for step in range(STEPS):
        images = torch.rand(BATCH, 3, 224, 224, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(pixel_values=images).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
