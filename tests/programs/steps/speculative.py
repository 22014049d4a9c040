"""Speculative decoding: a draft and a target model, each with a cache of keys and values of its own.

Prints by how many bytes a call of each model grows its cache.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past):
        queries, keys, values = self.qkv(x).chunk(3, -1)
        if past is None:
            keys, values = keys.clone(), values.clone()
        else:
            keys, values = torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1)
        return x + self.out(nn.functional.scaled_dot_product_attention(queries, keys, values)), (keys, values)


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))

    def forward(self, ids, past):
        x, cache = self.embed(ids), []
        for number, layer in enumerate(self.layers):
            x, pair = layer(x, past[number] if past else None)
            cache.append(pair)
        return self.head(x[:, -1]), cache


class Draft(Model):
    pass


class Target(Model):
    pass


def held(cache):
    return sum(tensor.untyped_storage().nbytes() for pair in cache for tensor in pair)


BATCH = 16
draft, target = Draft(128, 2).cuda().eval(), Target(512, 4).cuda().eval()
with torch.no_grad():
    prompt = torch.zeros(BATCH, 256, dtype=torch.long, device="cuda")
    _, of_draft = draft(prompt, None)
    _, of_target = target(prompt, None)
    for _ in range(40):
        for _ in range(3):
            token = torch.zeros(BATCH, 1, dtype=torch.long, device="cuda")
            _, of_draft = draft(token, of_draft)
        tokens = torch.zeros(BATCH, 3, dtype=torch.long, device="cuda")
        _, of_target = target(tokens, of_target)
print("draft", held(of_draft) // (256 + 120), "target", 3 * held(of_target) // (256 + 120))
