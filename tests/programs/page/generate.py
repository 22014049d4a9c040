"""Generates a long text from a short prompt: the key-value cache grows with each token, and the peak is at the last one."""
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, cache):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if cache:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        cache["k"], cache["v"] = k, v
        return nn.functional.scaled_dot_product_attention(q, k, v)


@torch.inference_mode()
def answer(layers, x, tokens):
    caches = [{} for _ in layers]
    for _ in range(tokens):
        for layer, cache in zip(layers, caches):
            x = x + layer(x, cache)
        x = x[:, -1:].clone()
    return x.cpu()


layers = nn.ModuleList(Attention(512) for _ in range(3)).cuda().eval()
answer(layers, torch.randn(8, 4, 512, device="cuda"), 120)
