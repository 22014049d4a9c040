"""Scores sentences with an encoder that has only been built for inference; attention is written out."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("half-the-batch", "smaller-evaluation-batch", "bfloat16-model", "scaled-dot-product-attention", "autocast")
WIDTH, HEADS = 768, 12


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        b, n, _ = hidden.shape
        q, k, v = (layer(hidden).view(b, n, HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if "scaled-dot-product-attention" in CHANGES:
            context = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5, dim=-1)
            context = torch.matmul(weights, v)
        return self.output(context.transpose(1, 2).reshape(b, n, WIDTH))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1 = SelfAttention(), nn.LayerNorm(WIDTH)
        self.intermediate, self.output, self.norm2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.output(nn.functional.gelu(self.intermediate(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(30522, WIDTH)
        self.layer = nn.ModuleList(Layer() for _ in range(12))
        self.pooler = nn.Linear(WIDTH, 2)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        return self.pooler(x[:, 0])


@torch.inference_mode()
def score(model, sentences):
    return model(sentences.cuda()).softmax(-1)


model = Encoder().eval().cuda().to(CHANGES.dtype)
half = "half-the-batch" in CHANGES or "smaller-evaluation-batch" in CHANGES
batch, turns = (16, 8) if half else (32, 4)
scores = []
for _ in range(turns):
    with CHANGES.around_forward():
        scores.append(score(model, torch.randint(30522, (batch, 512))).cpu())
changes.done()
