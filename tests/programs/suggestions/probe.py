"""Fine-tunes an attentive head on the patch features of a frozen backbone, clearing gradients only before backward."""
import changes
import torch
from torch import nn

SUPPORTED = ("smaller-batches", "checkpoint-layers", "set-to-none", "bfloat16-model", *changes.ADAM, *changes.FORWARD)
CHANGES = changes.parse(*SUPPORTED)


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            nn.Conv2d(width, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, width, 1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(self.body(x) + x)


def frozen_backbone():
    stages, width = [nn.Conv2d(3, 64, 4, 4)], 64
    for following in (256, 512, 1024):
        stages += [Bottleneck(width), Bottleneck(width), nn.Conv2d(width, following, 2 if width > 64 else 1, 2)]
        width = following
    return nn.Sequential(*stages).eval().requires_grad_(False)


class AttentiveHead(nn.Module):
    def __init__(self, width=1024, depth=4):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        sizes = {"d_model": width, "nhead": 16, "dim_feedforward": 2 * width, "batch_first": True}
        self.refine = nn.ModuleList(nn.TransformerEncoderLayer(**sizes) for _ in range(depth))
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(**sizes) for _ in range(depth))
        self.classify = nn.Linear(width, 200)

    def forward(self, features):
        patches, query = features.flatten(2).transpose(1, 2), self.query.expand(len(features), -1, -1)
        for refine, layer in zip(self.refine, self.layers):
            patches = refine(patches)
            query = layer(query, patches)
        return self.classify(query.squeeze(1))


def main():
    backbone = frozen_backbone().to("cuda", CHANGES.dtype)
    head = AttentiveHead().to("cuda", CHANGES.dtype)
    CHANGES.checkpoint("refine.*", head)
    optimizer = CHANGES.optimizer(torch.optim.AdamW, head, lr=1e-4)
    batch, accumulate = CHANGES.batches(24)
    for _ in range(5):
        for micro in range(accumulate):
            images = torch.randn(batch, 3, 192, 192, device="cuda", dtype=CHANGES.dtype)
            labels = torch.zeros(batch, dtype=torch.long, device="cuda")
            with CHANGES.around_forward():
                loss = nn.functional.cross_entropy(head(backbone(images)), labels) / accumulate
            if micro == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if "set-to-none" in CHANGES:
            optimizer.zero_grad()
    changes.done()


main()
