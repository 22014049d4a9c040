"""Builds a tree of features for each batch; its nodes refer to their parents."""
# issue: reference-cycle
import gc

import torch
import torch.nn as nn


class Node:
    def __init__(self, value, parent=None):
        self.value, self.parent, self.children = value, parent, []
        if parent is not None:
            parent.children.append(self)


def grow(net, x):
    root = Node(x)
    for _ in range(3):
        Node(net(root.value), root)  # issue here
    return sum(child.value.mean() for child in root.children)


net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
with torch.no_grad():
    for i in range(24):
        grow(net, torch.randn(1024, 1024, device="cuda"))  # issue here
        if i % 6 == 5:
            gc.collect()
