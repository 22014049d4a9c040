"""Trains a small GPT whose attention is written out: the softmax of QK^T under a causal mask."""
# limits: 1500M 2300M
import math

import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "scaled-dot-product-attention",
                        "chunked-cross-entropy", *changes.ADAM, *changes.FORWARD)
BATCH, LENGTH, WIDTH, HEADS, DEPTH, VOCABULARY = 8, 512, 512, 8, 8, 8192


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if "scaled-dot-product-attention" in CHANGES:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return CHANGES.cross_entropy(self.head, self.norm(x), targets)


model = GPT().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("blocks.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=3e-4)
batch, accumulate = CHANGES.batches(BATCH)
for step in range(3):
    for _ in range(accumulate):
        ids = torch.randint(VOCABULARY, (batch, LENGTH + 1)).cuda()
        with CHANGES.around_forward():
            loss = model(ids[:, :-1], ids[:, 1:]) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
