"""A GPT-2-sized decoder (124 M parameters), AdamW, bf16 autocast: two layers with `small`, so that it also runs over the simulated CUDA."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import oracle

small = "small" in sys.argv
layers, width, heads, vocabulary, context = (2, 256, 4, 1000, 64) if small else (12, 768, 12, 50257, 1024)
batch, steps = (2, 3) if small else (8, 5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


oracle.start()
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(steps):
    ids = torch.zeros(batch, context, dtype=torch.long).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().view(-1, vocabulary), ids.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
