"""Faster R-CNN with a ResNet-50 FPN of torchvision: training on images of several sizes with a few boxes each."""

import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn

BATCH, STEPS, BOXES = 4, 3, 6


def sample(index):
    height, width = [(480, 640), (600, 600), (427, 640), (640, 480)][index % 4]
    corner = torch.rand(BOXES, 2) * torch.tensor([width / 2, height / 2])
    size = 20 + torch.rand(BOXES, 2) * torch.tensor([width / 2 - 20, height / 2 - 20])
    target = {"boxes": torch.cat([corner, corner + size], dim=1), "labels": torch.randint(1, 91, (BOXES,))}
    return torch.rand(3, height, width), target


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, trainable_backbone_layers=5).to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.002, momentum=0.9, weight_decay=5e-4)
    model.train()
    for step in range(STEPS):
        batch = [sample(step * BATCH + index) for index in range(BATCH)]
        images = [image.to(device) for image, _ in batch]
        targets = [{key: value.to(device) for key, value in target.items()} for _, target in batch]
        losses = model(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: " + ", ".join(f"{name} {value.item():.3f}" for name, value in losses.items()))


if __name__ == "__main__":
    main()
