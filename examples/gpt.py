"""A GPT with 406 million parameters, trained with Adam for three steps: an ordinary training script that does not use
memtrace.

A common question about such a script: why does the forward pass add this much memory, the backward pass that much, and
the first optimizer.step() twice as much again?
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 24, 1024, 16, 50257, 1024, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.ln(self.blocks(x)))


def main():
    with torch.device("cuda"):
        model = GPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for step in range(3):
        ids = torch.zeros(BATCH, CONTEXT, dtype=torch.long).cuda()
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


main()
