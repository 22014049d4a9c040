# issue: none
"""Keys and values of the last 40 prompts, without modules and steps. The cache fills in the second half of the run."""

import torch

TABLE = torch.randn(4096, 64, device="cuda")
cache = {}


def handle(number, tokens):
    scores = TABLE[tokens] @ TABLE.T
    if number >= 60:
        cache[number] = scores
        if len(cache) > 40:
            cache.pop(next(iter(cache)))
    return scores.topk(16, dim=1).values.sum()


for number in range(130):
    handle(number, torch.randint(0, 4096, (64,), device="cuda"))
