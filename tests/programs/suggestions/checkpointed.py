"""Trains a decoder whose blocks are already checkpointed, with float32 weights under bfloat16 autocast."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHANGES = changes.parse("smaller-batches", "chunked-cross-entropy", "bfloat16-model", "offload-activations", *changes.ADAM)
WIDTH, LENGTH, VOCABULARY = 768, 1024, 32000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 12, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids[:, :-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return CHANGES.cross_entropy(self.head, self.norm(x), ids[:, 1:])


model = Model().cuda().to(CHANGES.dtype)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=3e-4)
batch, accumulate = CHANGES.batches(8)
for step in range(3):
    for _ in range(accumulate):
        ids = torch.randint(VOCABULARY, (batch, LENGTH + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16), CHANGES.around_forward():
            loss = model(ids)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
