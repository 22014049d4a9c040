"""Generates text with a key-value cache that starts empty with each request."""
# issue: none
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        cache["k"], cache["v"] = k, v
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


@torch.inference_mode()
def answer(layers, prompt, tokens):
    caches = [{} for _ in layers]
    x = prompt
    for _ in range(tokens):
        for layer, cache in zip(layers, caches):
            x = x + layer(x, cache)
        x = x[:, -1:].clone()
    return x.cpu()


layers = nn.ModuleList(Attention(512) for _ in range(3)).cuda().eval()
for request in range(3):
    answer(layers, torch.randn(8, 64 + 32 * request, 512, device="cuda"), 16)
