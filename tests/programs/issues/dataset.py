# issue: none
"""Pictures are read one after the other, and then used."""

import torch

pictures = []
for number in range(200):
    picture = torch.zeros(3, 128, 128, device="cuda")
    pictures.append((picture + number).clamp(0, 255) / 255)
mean = torch.stack(pictures).mean(dim=0)
for number in range(100):
    nearest = (pictures[number] - mean).square().sum().sqrt()
