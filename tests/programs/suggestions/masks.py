"""Trains a small language model whose attention layers each have a causal mask of their own, for the longest sequence."""
import changes
import torch
from torch import nn
from torch.nn import functional

CHANGES = changes.parse("share-buffers", "smaller-batches", "checkpoint-layers", "offload-activations", *changes.ADAM)
WIDTH, HEADS, LONGEST, LAYERS = 384, 6, 2048, 8


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if "share-buffers" not in CHANGES:
            self.register_buffer("attn_mask", torch.full((LONGEST, LONGEST), float("-inf")).triu(1))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if "share-buffers" in CHANGES:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.attn_mask[:length, :length])
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, WIDTH)
        self.layers = nn.ModuleList(CausalAttention() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2000)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


model = Model().cuda()
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
size, accumulate = CHANGES.batches(8)
for step in range(4):
    for _ in range(accumulate):
        ids = torch.zeros(size, 256, dtype=torch.long, device="cuda")
        with CHANGES.around_forward():
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / accumulate
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad()
changes.done()
