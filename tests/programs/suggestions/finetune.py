"""Fine-tunes all parameters of a language model on short texts, so that optimizer state and gradients fill the memory."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("adapters", "smaller-batches", "bfloat16-model", "checkpoint-layers", *changes.ADAM, *changes.FORWARD)
WIDTH, DEPTH, VOCABULARY = 768, 10, 12000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 2048), nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, 12, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


with torch.device("cuda"):
    model = Model().to(CHANGES.dtype)
CHANGES.adapt(model)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=2e-5)
batch, accumulate = CHANGES.batches(4)
for step in range(3):
    for _ in range(accumulate):
        ids = torch.randint(VOCABULARY, (batch, 129), device="cuda")
        with CHANGES.around_forward():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
