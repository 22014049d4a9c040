"""Fine-tunes low-rank adapters of a frozen bfloat16 decoder with rotary positions."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "chunked-cross-entropy", "offload-activations", *changes.ADAM)
WIDTH, HEADS, RANK, LENGTH = 1024, 16, 8, 1024


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x)) * 2


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 2816), (WIDTH, 2816), (2816, WIDTH)))
        for frozen in (self.gate, self.up, self.down, self.input_layernorm, self.post_layernorm):
            frozen.requires_grad_(False)

    def forward(self, x, cos, sin):
        h = self.input_layernorm(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.post_layernorm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocabulary=32000, depth=10):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH).requires_grad_(False), nn.Linear(WIDTH, vocabulary, bias=False).requires_grad_(False)

    def positions(self, length, dtype):
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))
        angles = torch.cat([angles, angles], -1).cuda()
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, ids):
        x = self.embed_tokens(ids[:, :-1])
        cos, sin = self.positions(x.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return CHANGES.cross_entropy(self.lm_head, self.norm(x), ids[:, 1:])


model = Decoder().to(torch.bfloat16).cuda()
CHANGES.checkpoint("layers.*", model)
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=2e-4)
batch, accumulate = CHANGES.batches(4)
for step in range(3):
    for _ in range(accumulate):
        with CHANGES.around_forward():
            loss = model(torch.randint(32000, (batch, LENGTH + 1), device="cuda"))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
