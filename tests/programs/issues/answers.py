# issue: none
"""Generates one answer, whose cache is a local variable of the function that returns at the end of the program."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 1000)

    def forward(self, token, cache):
        x = self.embed(token)
        cache.append((self.key(x), self.value(x)))
        keys = torch.cat([k for k, _ in cache], 1)
        values = torch.cat([v for _, v in cache], 1)
        attention = torch.softmax(x @ keys.transpose(1, 2), -1)
        return self.head(attention @ values)[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def main():
    model = Decoder().cuda().eval()
    cache, token = [], torch.zeros(64, 1, dtype=torch.long, device="cuda")
    for _ in range(100):
        token = model(token, cache)
    print(token.sum().item() >= 0)


main()
