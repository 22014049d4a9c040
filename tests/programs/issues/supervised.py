"""Every layer has a head and a loss: the list of features is a local of the step."""

# issue: none

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(5))
        self.heads = nn.ModuleList(nn.Linear(768, 10) for _ in range(5))

    def forward(self, x):
        feats = []
        for layer in self.layers:
            x = F.relu(layer(x))
            feats.append(x)
        return [h(f) for h, f in zip(self.heads, feats)], feats


def train_step(model, opt, x, y):
    opt.zero_grad()
    logits, feats = model(x)
    loss = sum(F.cross_entropy(z, y) for z in logits) + 1e-4 * sum(f.pow(2).mean() for f in feats)
    loss.backward()
    opt.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = Net().cuda()
    opt = torch.optim.AdamW(model.parameters())
    for step in range(20):
        train_step(model, opt, torch.randn(1024, 768).cuda(), torch.randint(0, 10, (1024,)).cuda())


main()
