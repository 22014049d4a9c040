"""Trains a mixture of experts with a fixed capacity: tokens are dispatched and combined by einsum, as in GShard."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)
WIDTH, EXPERTS, CAPACITY = 512, 8, 160


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 1024), (1024, WIDTH), (WIDTH, 1024)))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS * CAPACITY, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        b, t, _ = x.shape
        gates = self.gate(x).view(b, t, EXPERTS, CAPACITY)
        dispatch, combine = gates.softmax(1), gates.flatten(2).softmax(-1).view_as(gates)
        slots = torch.einsum("btec,btd->ebcd", dispatch, x)
        slots = torch.stack([expert(s) for expert, s in zip(self.experts, slots)])
        return torch.einsum("btec,ebcd->btd", combine, slots)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = MoE()

    def forward(self, x):
        q, k, v = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, 8, -1)).movedim(2, 0).transpose(2, 3)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(4096, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


model = Model().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
batch, accumulate = CHANGES.batches(8)
for _ in range(3):
    for _ in range(accumulate):
        ids = torch.randint(0, 4096, (batch, 513), device="cuda")
        with CHANGES.around_forward():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
