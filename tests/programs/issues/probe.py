"""A hook stores a layer's output for a later plot."""

# issue: leak

import torch
import torch.nn as nn
import torch.nn.functional as F

activations = {}


def get_activation(name):
    def hook(module, inputs, output):
        activations.setdefault(name, []).append(output.detach())
    return hook


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.fc = nn.Linear(128 * 4 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # issue here
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        return self.fc(x.flatten(1))


def main():
    torch.manual_seed(0)
    model = CNN().cuda()
    model.conv2.register_forward_hook(get_activation("conv2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(20):
        images, labels = torch.randn(64, 3, 32, 32).cuda(), torch.randint(0, 10, (64,)).cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(step, loss.item())


main()
