"""Trains a transformer whose twelve blocks are in one activation checkpoint, which runs all of them again."""
import changes
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM)
BATCH, LENGTH, WIDTH, DEPTH, VOCABULARY = 8, 512, 512, 12, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        x = self.tokens(ids)
        if "checkpoint-layers" in CHANGES:
            return self.head(self.run(x))
        return self.head(checkpoint(self.run, x, use_reentrant=False))


model = Model().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("blocks.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model)
batch, accumulate = CHANGES.batches(BATCH)
for _ in range(3):
    for _ in range(accumulate):
        ids = torch.randint(VOCABULARY, (batch, LENGTH), device="cuda")
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
