"""Inference on the second device; the weights are loaded on the first device and stay there too."""
# issue: wrong-device
# env: SIMCUDA_DEVICES=2
import os
import tempfile

import torch
import torch.nn as nn


def build():
    return nn.Sequential(nn.Conv2d(3, 128, 7), nn.ReLU(), nn.Conv2d(128, 256, 7), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 500))


class Member:
    def __init__(self, path, device):
        self.weights = torch.load(path, weights_only=True)  # issue here
        self.net = build().to(device).eval()
        self.net.load_state_dict(self.weights)
        self.device = device

    @torch.inference_mode()
    def __call__(self, images):
        return self.net(images.to(self.device)).softmax(1)


def store(path):
    torch.save(build().to("cuda:0").state_dict(), path)


path = os.path.join(tempfile.mkdtemp(), "member.pt")
store(path)
member = Member(path, torch.device("cuda:1"))
for _ in range(6):
    print(member(torch.randn(2, 3, 64, 64)).shape)
os.remove(path)
