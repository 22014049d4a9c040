"""Mask R-CNN with ResNet-50-FPN of torchvision: training on images of 800 x 1,088 pixels."""

import torch
from torchvision.models.detection import maskrcnn_resnet50_fpn_v2

BATCH, OBJECTS, HEIGHT, WIDTH, STEPS = 4, 20, 800, 1088, 3


def main():
    torch.manual_seed(0)
    model = maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=91, min_size=HEIGHT, max_size=WIDTH).to("cuda")
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for step in range(STEPS):
        images, targets = [], []
        for _ in range(BATCH):
            corners = torch.rand(OBJECTS, 2) * torch.tensor([WIDTH - 300.0, HEIGHT - 300.0])
            boxes = torch.cat([corners, corners + 20 + torch.rand(OBJECTS, 2) * 250], dim=1)
            images.append(torch.rand(3, HEIGHT, WIDTH).to("cuda"))
            masks = torch.zeros(OBJECTS, HEIGHT, WIDTH, dtype=torch.uint8)
            targets.append({"boxes": boxes.to("cuda"), "labels": torch.randint(1, 91, (OBJECTS, )).to("cuda"), "masks": masks.to("cuda")})
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
