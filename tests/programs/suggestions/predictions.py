"""Evaluates a super-resolution network without gradients and keeps every prediction on the GPU until the metric."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("predictions-to-cpu", "smaller-evaluation-batch", "half-the-batch", "bfloat16-model")


class Upscaler(nn.Module):
    def __init__(self, width=64, depth=6):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, 1, 1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(depth))
        self.tail = nn.Sequential(nn.Conv2d(width, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, x):
        x = features = self.head(x)
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.tail(x + features)


model = Upscaler().cuda().eval().to(CHANGES.dtype)
half = "smaller-evaluation-batch" in CHANGES or "half-the-batch" in CHANGES
images, turns = (4, 48) if half else (8, 24)
predictions = []
with torch.no_grad():
    for _ in range(turns):
        small = torch.rand(images, 3, 256, 256, device="cuda", dtype=CHANGES.dtype)
        prediction = model(small)
        predictions.append(prediction.cpu() if "predictions-to-cpu" in CHANGES else prediction)
print("mean", [float(p.mean()) for p in predictions][-1])
changes.done()
