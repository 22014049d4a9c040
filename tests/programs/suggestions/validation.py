"""Trains a segmentation network on crops and validates it on whole images, without gradients: the peak is in the validation."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("smaller-evaluation-batch", "bfloat16-model", "autocast", "smaller-batches")


class Conv(nn.Sequential):
    def __init__(self, inputs, outputs, dilation=1):
        super().__init__(nn.Conv2d(inputs, outputs, 3, 1, dilation, dilation, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 32), nn.MaxPool2d(2), Conv(32, 64), nn.MaxPool2d(2))
        self.branches = nn.ModuleList(Conv(64, 96, dilation) for dilation in (1, 2, 4, 8))
        self.classify = nn.Conv2d(4 * 96, 19, 1)

    def forward(self, x):
        size = x.shape[2:]
        x = self.stem(x)
        x = self.classify(torch.cat([branch(x) for branch in self.branches], 1))
        return nn.functional.interpolate(x, size, mode="bilinear")


model = DeepLab().cuda().to(CHANGES.dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=255)
crops, accumulate = CHANGES.batches(2)
for epoch in range(2):
    model.train()
    for _ in range(3):
        for _ in range(accumulate):
            image = torch.randn(crops, 3, 128, 128, device="cuda", dtype=CHANGES.dtype)
            label = torch.randint(19, (crops, 128, 128), device="cuda")
            with CHANGES.around_forward():
                loss = criterion(model(image), label)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    images, turns = (2, 4) if "smaller-evaluation-batch" in CHANGES else (4, 2)
    with torch.no_grad():
        for _ in range(turns):
            image = torch.randn(images, 3, 512, 1024, device="cuda", dtype=CHANGES.dtype)
            label = torch.randint(19, (images, 512, 1024), device="cuda")
            with CHANGES.around_forward():
                losses.append(criterion(model(image), label))
    print("epoch", epoch, float(torch.stack(losses).mean()))
changes.done()
