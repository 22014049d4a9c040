"""Trains a ResNet with BatchNorm on images that come from the host, with SGD and momentum."""
# limits: 1200M 1800M
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.SGD, *changes.FORWARD)


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, planes * 4, 1, bias=False), nn.BatchNorm2d(planes * 4)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(3, 4, 6, 3), classes=1000):
        super().__init__()
        self.inplanes = 64
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self.stage(64, layers[0], 1)
        self.layer2 = self.stage(128, layers[1], 2)
        self.layer3 = self.stage(256, layers[2], 2)
        self.layer4 = self.stage(512, layers[3], 2)
        self.fc = nn.Linear(2048, classes)

    def stage(self, planes, blocks, stride):
        downsample = nn.Sequential(nn.Conv2d(self.inplanes, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4))
        layers = [Bottleneck(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * 4
        layers += [Bottleneck(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


model = ResNet().to(device="cuda", dtype=CHANGES.dtype)
CHANGES.checkpoint("layer?.*", model)
criterion = nn.CrossEntropyLoss()
optimizer = CHANGES.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, weight_decay=1e-4)
batch, accumulate = CHANGES.batches(32)
for step in range(3):
    optimizer.zero_grad()
    for _ in range(accumulate):
        images, labels = torch.zeros(batch, 3, 176, 176, dtype=CHANGES.dtype), torch.zeros(batch, dtype=torch.long)
        images, labels = images.cuda(), labels.cuda()
        with CHANGES.around_forward():
            outputs = model(images)
            loss = criterion(outputs, labels)
        loss.backward()
    optimizer.step()
changes.done()
