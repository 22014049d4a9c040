"""ResNet-50 of torchvision with automatic mixed precision, channels_last and a GradScaler."""

import torch
import torch.nn as nn
import torchvision

BATCH, STEPS = 128, 5


def main():
    torch.manual_seed(0)
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224).cuda(non_blocking=True).to(memory_format=torch.channels_last)
        targets = torch.randint(1000, (BATCH,)).cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
