"""Trains a siamese network on triplets of pictures, and embeds a gallery after every second step without no_grad."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "no-grad",
                        "smaller-evaluation-batch", *changes.SGD, *changes.FORWARD)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.short = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        return F.leaky_relu(self.second(F.leaky_relu(self.first(x), 0.1)) + self.short(x), 0.1)


backbone = nn.Sequential(
    Residual(3, 64, 2), Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2),
)
projection = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 128))
network = nn.Sequential(backbone, projection).to(device="cuda", dtype=CHANGES.dtype)
CHANGES.checkpoint("0.*", network)
optimizer = CHANGES.optimizer(torch.optim.SGD, network, lr=0.01, momentum=0.9, nesterov=True)
batch, accumulate = CHANGES.batches(32)
gallery_batch = 32 if "smaller-evaluation-batch" in CHANGES else 128


def pictures(count):
    return torch.randn(count, 3, 128, 128, device="cuda", dtype=CHANGES.dtype)


def embed(images):
    return F.normalize(network(images), dim=-1)


for step in range(6):
    for _ in range(accumulate):
        with CHANGES.around_forward():
            anchor, positive, negative = embed(pictures(batch)), embed(pictures(batch)), embed(pictures(batch))
            loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.3) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del anchor, positive, negative, loss
    if step % 2:
        network.eval()
        with torch.set_grad_enabled("no-grad" not in CHANGES):
            gallery = [embed(pictures(gallery_batch)).detach() for _ in range(256 // gallery_batch)]
        similarity = torch.cat(gallery) @ torch.cat(gallery).T
        network.train()
changes.done()
