# issue: leak
"""A search over a table of vectors, without modules and steps. Each request leaves its scores in a dict."""

import torch

TABLE = torch.randn(4096, 64, device="cuda")
answers = {}


def embed(tokens):
    return TABLE[tokens]


def handle(number, tokens):
    scores = embed(tokens) @ TABLE.T  # issue here
    best = scores.topk(16, dim=1).values
    answers[number] = scores
    return best.sum()


def main():
    for number in range(120):
        handle(number, torch.randint(0, 4096, (64,), device="cuda"))


main()
