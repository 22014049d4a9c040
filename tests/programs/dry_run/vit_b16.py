"""ViT-B/16 of torchvision in bfloat16 autocast, with an exponential moving average of the weights."""

import torch
import torch.nn as nn
import torchvision
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, STEPS = 64, 4


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = torchvision.models.vit_b_16(num_classes=1000).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.3)
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224, device=device)
        labels = torch.randint(1000, (BATCH,), device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
