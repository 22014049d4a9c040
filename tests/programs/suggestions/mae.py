"""Pretrains a masked autoencoder that sees a quarter of an image's patches and paints the others."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "scaled-dot-product-attention",
                        "set-to-none", *changes.ADAM, *changes.FORWARD)
PATCH, SIDE = 16, 14
PATCHES, PIXELS = SIDE * SIDE, 3 * PATCH * PATCH
VISIBLE = PATCHES // 4


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if "scaled-dot-product-attention" in CHANGES:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        widen, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), widen, nn.GELU(), narrow)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class MaskedAutoencoder(nn.Module):
    def __init__(self, width=512, narrow=256):
        super().__init__()
        self.embed, self.positions = nn.Linear(PIXELS, width), nn.Parameter(torch.zeros(PATCHES, width))
        self.encoder = nn.Sequential(*(Block(width, 8) for _ in range(10)), nn.LayerNorm(width))
        self.bridge, self.hole = nn.Linear(width, narrow), nn.Parameter(torch.zeros(1, 1, narrow))
        self.places = nn.Parameter(torch.zeros(PATCHES, narrow))
        self.decoder = nn.Sequential(*(Block(narrow, 8) for _ in range(4)), nn.LayerNorm(narrow))
        self.paint = nn.Linear(narrow, PIXELS)

    def forward(self, patches, order):
        seen = (self.embed(patches) + self.positions).index_select(1, order[:VISIBLE])
        latent = self.bridge(self.encoder(seen))
        full = torch.cat((latent, self.hole.expand(len(patches), PATCHES - VISIBLE, -1).to(latent.dtype)), dim=1)
        painted = self.paint(self.decoder(full + self.places.index_select(0, order)))
        return (painted[:, VISIBLE:] - patches.index_select(1, order[VISIBLE:])).pow(2).mean()


model = MaskedAutoencoder().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("*coder.[0-9]", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1.5e-4, betas=(0.9, 0.95))
batch, accumulate = CHANGES.batches(48)
for step in range(4):
    optimizer.zero_grad(set_to_none="set-to-none" in CHANGES)
    for _ in range(accumulate):
        patches = torch.randn(batch, PATCHES, PIXELS, device="cuda", dtype=CHANGES.dtype)
        order = torch.arange(PATCHES, device="cuda").roll(step)
        with CHANGES.around_forward():
            loss = model(patches, order) / accumulate
        loss.backward()
    optimizer.step()
changes.done()
