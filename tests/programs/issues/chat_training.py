"""Fine-tunes a decoder with grouped-query attention; the keys and values that it returns for generation stay unused."""
# issue: none
import torch
import torch.nn as nn
import torch.nn.functional as F

HEADS, GROUPS, SIZE = 8, 2, 64


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q = nn.Linear(width, HEADS * SIZE, bias=False)
        self.k = nn.Linear(width, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(width, GROUPS * SIZE, bias=False)
        self.o = nn.Linear(HEADS * SIZE, width, bias=False)

    def forward(self, x, cache):
        def split(t, heads):
            return t.view(*x.shape[:2], heads, SIZE).transpose(1, 2)

        q, k, v = split(self.q(x), HEADS), split(self.k(x), GROUPS), split(self.v(x), GROUPS)
        k, v = k.contiguous() * 1.0, v.contiguous() * 1.0
        cache.append((k, v))
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, cache):
        x = x + self.attention(self.norm(x), cache)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 1000)

    def forward(self, ids):
        x, cache = self.embed(ids), []
        for block in self.blocks:
            x = block(x, cache)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "cache": cache}


model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    ids = torch.randint(0, 1000, (16, 256), device="cuda")
    if step % 2:
        loss = model(ids)["loss"]  # the cache is dropped before the backward pass
    else:
        out = model(ids)  # and here after it
        loss = out["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    out = None
