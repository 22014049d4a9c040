"""Trains a segmentation network with skip connections on masks, and scores it every second step with gradients on."""
import contextlib

import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "no-grad", "predictions-to-cpu",
                        "smaller-evaluation-batch", *changes.ADAM, *changes.FORWARD)
WIDTHS = (32, 64, 128, 256)


def double_conv(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(inplace=True),
    )


def build():
    pairs = list(zip(WIDTHS, WIDTHS[1:]))
    return nn.ModuleDict({
        "down": nn.ModuleList([double_conv(3, WIDTHS[0]), *(double_conv(a, b) for a, b in pairs)]),
        "widen": nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs)),
        "up": nn.ModuleList(double_conv(2 * a, a) for a, _ in reversed(pairs)),
        "mask": nn.Conv2d(WIDTHS[0], 1, 1),
    })


def segment(net, x):
    skips = []
    for level, stage in enumerate(net["down"]):
        x = stage(F.max_pool2d(x, 2) if level else x)
        skips.append(x)
    skips.pop()
    for widen, stage in zip(net["widen"], net["up"]):
        x = stage(torch.cat((skips.pop(), widen(x)), dim=1))
    return net["mask"](x)


def evaluate(net, images=48):
    size = 4 if "smaller-evaluation-batch" in CHANGES else 16
    predictions = []
    with torch.no_grad() if "no-grad" in CHANGES else contextlib.nullcontext():
        for _ in range(images // size):
            image = torch.rand(size, 3, 192, 192, device="cuda", dtype=CHANGES.dtype)
            prediction = segment(net, image).sigmoid().detach()
            predictions.append(prediction.cpu() if "predictions-to-cpu" in CHANGES else prediction)
    return torch.cat(predictions).shape


net = build().to(device="cuda", dtype=CHANGES.dtype)
CHANGES.checkpoint("[du]*.*", net)
optimizer = CHANGES.optimizer(torch.optim.Adam, net, lr=1e-3)
batch, accumulate = CHANGES.batches(20)
for step in range(1, 5):
    for _ in range(accumulate):
        images = torch.rand(batch, 3, 192, 192, device="cuda", dtype=CHANGES.dtype)
        masks = torch.zeros(batch, 1, 192, 192, device="cuda", dtype=CHANGES.dtype)
        with CHANGES.around_forward():
            loss = F.binary_cross_entropy_with_logits(segment(net, images), masks) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        evaluate(net)
changes.done()
