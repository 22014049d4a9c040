"""ConvNeXt-T of timm: mixup targets, bfloat16 autocast, drop path, AdamW."""

import timm
import torch
from timm.loss import SoftTargetCrossEntropy

BATCH, STEPS, CLASSES = 64, 4, 1000


def main():
    torch.manual_seed(0)
    model = timm.create_model("convnext_tiny", pretrained=False, num_classes=CLASSES, drop_path_rate=0.1).cuda()
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    criterion = SoftTargetCrossEntropy()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224).cuda().to(memory_format=torch.channels_last)
        targets = torch.rand(BATCH, CLASSES).softmax(dim=1).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
