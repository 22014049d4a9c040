"""Trains a vision transformer under bfloat16 autocast, with F.scaled_dot_product_attention."""
import changes
import torch
from torch import nn
from torch.nn import functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, "offload-activations")


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.fc2(self.act(self.fc1(x))))


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=384, depth=12, heads=6, patch=16, size=224, classes=1000):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*[EncoderBlock(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def main():
    model = ViT().to("cuda", CHANGES.dtype)
    CHANGES.checkpoint("blocks.*", model)
    optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-3, weight_decay=0.05)
    batch, accumulate = CHANGES.batches(48)
    for _ in range(3):
        for _ in range(accumulate):
            images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=CHANGES.dtype)
            labels = torch.randint(0, 1000, (batch,), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16), CHANGES.around_forward():
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changes.done()


main()
