"""A Transformer with activation checkpointing of every layer, accumulated gradients and the single-tensor SGD."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY, ACCUMULATION, STEPS = 4, 2048, 1024, 12, 32000, 4, 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, activation="gelu", batch_first=True) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Encoder().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=False)
    for step in range(STEPS):
        total = 0.0
        for _ in range(ACCUMULATION):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
            loss = nn.functional.cross_entropy(model(tokens).view(-1, VOCABULARY), tokens.view(-1)) / ACCUMULATION
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}")


if __name__ == "__main__":
    main()
