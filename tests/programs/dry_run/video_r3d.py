"""Video classification: R3D-18 of torchvision, 3-D convolutions in bfloat16 autocast."""

import torch
import torch.nn.functional as F
from torchvision.models.video import r3d_18

BATCH, FRAMES, SIZE, STEPS = 16, 16, 112, 4


def main():
    torch.manual_seed(0)
    model = r3d_18(num_classes=400).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        clips = torch.randn(BATCH, 3, FRAMES, SIZE, SIZE, device="cuda")
        labels = torch.randint(400, (BATCH,), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(clips), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
