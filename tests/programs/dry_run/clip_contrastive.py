"""CLIP (ViT-B/32) trained with its contrastive loss in float32."""

import torch
from transformers import CLIPConfig, CLIPModel

BATCH, STEPS = 96, 3


def main():
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig()).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    model.train()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224, device="cuda")
        texts = torch.randint(1, 49405, (BATCH, 77))
        texts[:, -1] = 49407
        loss = model(pixel_values=images, input_ids=texts.to("cuda"), return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
