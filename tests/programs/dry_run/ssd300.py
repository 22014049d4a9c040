"""SSD300 with a VGG-16 backbone of torchvision: training with hard negative mining."""

import torch
from torchvision.models.detection import ssd300_vgg16

BATCH, STEPS, BOXES = 16, 4, 4


def main():
    torch.manual_seed(0)
    model = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=21, trainable_backbone_layers=5).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
    model.train()
    for step in range(STEPS):
        images = list(torch.rand(BATCH, 3, 300, 300).cuda())
        targets = []
        for _ in range(BATCH):
            corner = torch.rand(BOXES, 2) * 150
            boxes = torch.cat([corner, corner + 40 + torch.rand(BOXES, 2) * 100], dim=1).cuda()
            targets.append({"boxes": boxes, "labels": torch.randint(1, 21, (BOXES,)).cuda()})
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
