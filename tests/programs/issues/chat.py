"""A chat server that appends the keys and values of every request to one cache."""

# issue: leak

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.keys = self.values = None

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        self.keys = k.clone() if self.keys is None else torch.cat([self.keys, k], 1)  # issue here
        self.values = v.clone() if self.values is None else torch.cat([self.values, v], 1)  # issue here
        return self.out(F.scaled_dot_product_attention(q, self.keys, self.values))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList([Attention(512) for _ in range(4)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x[:, -1] @ self.embed.weight.T


@torch.inference_mode()
def answer(model, prompt):
    tokens = prompt.cuda()
    for _ in range(3):
        tokens = model(tokens).argmax(-1, keepdim=True)
    return tokens.cpu()


model = Model().cuda().eval()
for _ in range(16):
    answer(model, torch.zeros(1, 128, dtype=torch.long))
