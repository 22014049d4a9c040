"""Three training steps of GPT-2 with 124 M parameters: batch 8 x 1024, bf16 autocast, AdamW."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH, STEPS = 50257, 768, 12, 12, 1024, 8, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.view(len(x), LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(STEPS):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
