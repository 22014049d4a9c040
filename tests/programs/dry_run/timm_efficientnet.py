"""EfficientNet-B0 of timm in float32 with timm's optimizer, then an evaluation with a larger batch."""

import timm
import timm.optim
import torch

BATCH, STEPS = 96, 4


def main():
    torch.manual_seed(0)
    model = timm.create_model("efficientnet_b0", pretrained=False, drop_rate=0.2).cuda()
    optimizer = timm.optim.create_optimizer_v2(model, opt="rmsproptf", lr=0.01, weight_decay=1e-5, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (BATCH,), device="cuda")
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    correct = 0
    with torch.no_grad():
        for _ in range(2):
            images = torch.randn(2 * BATCH, 3, 224, 224, device="cuda")
            labels = torch.randint(1000, (2 * BATCH,), device="cuda")
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    print(f"{correct} of {4 * BATCH} correct")


if __name__ == "__main__":
    main()
