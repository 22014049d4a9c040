"""RetinaNet with a ResNet-50 FPN of torchvision: training, then detection with non-maximum suppression."""

import torch
from torchvision.models.detection import retinanet_resnet50_fpn

BATCH, STEPS, BOXES, SIZE = 4, 3, 5, 512


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, trainable_backbone_layers=5).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for step in range(STEPS):
        images = [torch.rand(3, SIZE, SIZE).to(device) for _ in range(BATCH)]
        targets = []
        for _ in range(BATCH):
            corner = torch.rand(BOXES, 2) * SIZE / 2
            boxes = torch.cat([corner, corner + 30 + torch.rand(BOXES, 2) * 200], dim=1)
            targets.append({"boxes": boxes.to(device), "labels": torch.randint(1, 91, (BOXES,)).to(device)})
        losses = model(images, targets)
        loss = losses["classification"] + losses["bbox_regression"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        found = model([torch.rand(3, SIZE, SIZE, device=device) for _ in range(BATCH)])
    print("detections:", [len(one["boxes"]) for one in found])


if __name__ == "__main__":
    main()
