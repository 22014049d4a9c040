"""Continues the training of a language model whose output layer is the embedding, three micro-batches a step."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse(
    "smaller-batches", "checkpoint-layers", "chunked-cross-entropy", "bfloat16-model", "adapters",
    "single-tensor-step", "fused-step", "eight-bit-moments", *changes.FORWARD,
)
VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH = 32000, 512, 6, 8, 512


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_query, self.to_key, self.to_value = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        self.to_output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        normed = self.attention_norm(x)
        query, key, value = self.to_query(normed), self.to_key(normed), self.to_value(normed)
        mixed = F.scaled_dot_product_attention(self.split(query), self.split(key), self.split(value), is_causal=True)
        x = x + self.to_output(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


model = LanguageModel().to("cuda", CHANGES.dtype)
CHANGES.adapt(model)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=3e-4, betas=(0.9, 0.95))
batch, accumulate = CHANGES.batches(4, 3)
for step in range(4):
    for micro in range(accumulate):
        ids = torch.zeros(batch, LENGTH + 1, dtype=torch.long, device="cuda")
        with CHANGES.around_forward():
            loss = CHANGES.cross_entropy(model.head, model(ids[:, :-1]), ids[:, 1:]) / accumulate
        loss.backward()
        del loss
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
changes.done()
