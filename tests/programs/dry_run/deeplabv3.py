"""DeepLabV3 with a ResNet-50 backbone of torchvision: training with the auxiliary head, then an evaluation."""

import torch
import torch.nn.functional as F
from torchvision.models.segmentation import deeplabv3_resnet50

BATCH, SIZE, CLASSES, STEPS = 8, 480, 21, 3


def main():
    torch.manual_seed(0)
    device = "cuda"
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    model.train()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, SIZE, SIZE, device=device)
        masks = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.long, device=device)
        output = model(images)
        loss = F.cross_entropy(output["out"], masks, ignore_index=255) + 0.5 * F.cross_entropy(output["aux"], masks, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES, device=device)
    with torch.inference_mode():
        for _ in range(2):
            images = torch.randn(BATCH, 3, SIZE, SIZE, device=device)
            masks = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.long, device=device)
            predicted = model(images)["out"].argmax(dim=1)
            pairs = (masks * CLASSES + predicted).flatten().clamp(0, CLASSES * CLASSES - 1)
            confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs, dtype=torch.float32))
    print(f"accuracy {(confusion.diagonal().sum() / confusion.sum().clamp(min=1)).item():.4f}")


if __name__ == "__main__":
    main()
