# issue: leak
"""Particles that move by plain functions. Their whole trail is one tensor, which each iteration replaces by a longer one."""

import torch

positions = torch.zeros(1, 8192, 3, device="cuda")
trail = positions


def move(positions):
    pull = -positions / (1 + positions.square().sum(dim=2, keepdim=True))
    return positions + 0.01 * pull


for number in range(150):
    positions = move(positions)
    trail = torch.cat([trail, positions])  # issue here
