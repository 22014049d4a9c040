"""Trains a convolutional classifier of 21841 classes and scores it on the joined logits of an evaluation set."""
import changes
import torch
from torch import nn

CHANGES = changes.parse(
    "predictions-to-cpu", "smaller-evaluation-batch", "smaller-batches", "checkpoint-layers", "bfloat16-model",
    *changes.SGD, *changes.FORWARD,
)
CLASSES = 21841


def conv_norm_act(inputs, outputs, kernel, stride=1, groups=1):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, outputs), nn.SiLU(inplace=True))


def inverted(inputs, outputs, stride):
    wide = inputs * 4
    deep = conv_norm_act(wide, wide, 3, stride, groups=wide)
    return nn.Sequential(conv_norm_act(inputs, wide, 1), deep, nn.Conv2d(wide, outputs, 1))


def build():
    plan = [(32, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1)]
    features = nn.Sequential(conv_norm_act(3, 32, 3, 2), *[inverted(*row) for row in plan])
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, CLASSES))


def batch_of(size):
    images = torch.randn(size, 3, 128, 128, device="cuda", dtype=CHANGES.dtype)
    return images, torch.zeros(size, dtype=torch.long, device="cuda")


def train(model, optimizer, steps, size, accumulate):
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            images, labels = batch_of(size)
            with CHANGES.around_forward():
                loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1) / accumulate
            loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, examples=6144):
    model.eval()
    size = 64 if "smaller-evaluation-batch" in CHANGES else 128
    all_logits, all_labels = [], []
    for _ in range(examples // size):
        images, labels = batch_of(size)
        logits = model(images)
        if "predictions-to-cpu" in CHANGES:
            logits, labels = logits.cpu(), labels.cpu()
        all_logits.append(logits)
        all_labels.append(labels)
    all_logits, all_labels = torch.cat(all_logits), torch.cat(all_labels)
    return (all_logits.argmax(1) == all_labels).float().mean()


net = build().to("cuda", CHANGES.dtype)
CHANGES.checkpoint("0.*", net)
sgd = CHANGES.optimizer(torch.optim.SGD, net, lr=0.1, momentum=0.9, weight_decay=1e-4)
accuracies = []
for epoch in range(2):
    train(net, sgd, 3, *CHANGES.batches(32))
    accuracies.append(evaluate(net))
changes.done()
