"""Encodes documents with a large transformer under no_grad and keeps the vectors of all their tokens on the GPU."""
import changes
import torch
from torch import nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention

CHANGES = changes.parse("half-the-batch", "predictions-to-cpu", "bfloat16-model", "autocast")
DOCUMENTS, BATCH, LENGTH = 192, 32, 512


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.grow, self.shrink = Attention(width, heads), nn.Linear(width, 4096), nn.Linear(4096, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.shrink(gelu(self.grow(self.between(x))))


class Encoder(nn.Module):
    def __init__(self, width=1024, depth=12, heads=16, vocabulary=30000):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        return self.norm(self.layers(self.words(ids) + self.positions.weight))


def documents(batch):
    for _ in range(DOCUMENTS // batch):
        yield torch.zeros(batch, LENGTH, dtype=torch.long, device="cuda")


@torch.no_grad()
def encode(encoder):
    vectors = []
    for ids in documents(CHANGES.batches(BATCH)[0]):
        with CHANGES.around_forward():
            result = normalize(encoder(ids), dim=-1)
        vectors.append(result.cpu() if "predictions-to-cpu" in CHANGES else result)
    return vectors


encoder = Encoder().to("cuda", CHANGES.dtype).eval()
vectors = encode(encoder)
summaries = [tokens.mean(1) for tokens in vectors]
changes.done()
