"""A pyramid of feature maps. The trainer keeps the maps of the last batch as an attribute, for a picture that nobody draws."""
# issue: outputs-kept
import torch
import torch.nn as nn
import torch.nn.functional as F


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.levels = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))

    def forward(self, images):
        x = F.relu(self.stem(images))
        maps, scores = [], []
        for level in self.levels:
            x = F.relu(level(x))
            maps.append(F.interpolate(x, size=images.shape[-2:]))  # issue here
            scores.append(maps[-1].mean())
            x = F.max_pool2d(x, 2)
        return maps, sum(scores)


class Trainer:
    def __init__(self):
        self.net = Pyramid().to("cuda")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def step(self, images):
        self.maps, loss = self.net(images)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


trainer = Trainer()
for _ in range(5):
    trainer.step(torch.zeros(16, 3, 128, 128, device="cuda"))
