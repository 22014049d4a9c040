"""Trains a VGG with dropout and large fully connected layers, with SGD and Nesterov momentum."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.SGD, *changes.FORWARD)


def make_features():
    layers, inputs = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        self.features = make_features()
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(nn.Linear(512 * 16, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True),
                                        nn.Dropout(), nn.Linear(4096, classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


with torch.device("cuda:0"):
    model = VGG().to(CHANGES.dtype)
CHANGES.checkpoint("features.*", model)
loss_fn = nn.CrossEntropyLoss()
opt = CHANGES.optimizer(torch.optim.SGD, model, lr=0.01, momentum=0.9, nesterov=True)
batch, accumulate = CHANGES.batches(16)
for i in range(3):
    for _ in range(accumulate):
        inputs = torch.rand(batch, 3, 160, 160, dtype=CHANGES.dtype).cuda(non_blocking=True)
        targets = torch.randint(0, 1000, (batch,)).cuda(non_blocking=True)
        with CHANGES.around_forward():
            preds = model(inputs)
            loss = loss_fn(preds, targets)
        loss.backward()
    opt.step()
    opt.zero_grad()
changes.done()
