"""Trains a text-conditioned diffusion transformer on latents, with a text encoder and a moving average."""
import copy
import changes
import torch
from torch import nn
from torch.nn import functional as F

OWN = ("smaller-batches", "checkpoint-layers", "no-grad", "freeze-unused", "bfloat16-model")
CHANGES, WIDTH, HEADS = changes.parse(*OWN, *changes.ADAM, *changes.FORWARD), 512, 8


class Denoiser(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.modulate = nn.Linear(WIDTH, 2 * WIDTH)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.text = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x, context, time):
            scale, shift = self.modulate(F.silu(time)).unsqueeze(1).chunk(2, dim=-1)
            y = torch.addcmul(shift, self.norms[0](x), 1 + scale)
            x = x + self.own(y, y, y, need_weights=False)[0]
            x = x + self.text(self.norms[1](x), context, context)[0]
            return x + self.feed(self.norms[2](x))

    def __init__(self, depth=8):
        super().__init__()
        self.patch, self.time = nn.Conv2d(4, WIDTH, 2, 2), nn.Embedding(1000, WIDTH)
        self.place = nn.Parameter(torch.zeros(1, 256, WIDTH))
        self.blocks = nn.ModuleList(self.Block() for _ in range(depth))
        self.unpatch = nn.ConvTranspose2d(WIDTH, 4, 2, 2)

    def forward(self, latents, times, context):
        x, time = self.patch(latents).flatten(2).transpose(1, 2) + self.place, self.time(times)
        for block in self.blocks:
            x = block(x, context, time)
        return self.unpatch(x.transpose(1, 2).unflatten(2, (16, 16)))


like = {"device": "cuda", "dtype": CHANGES.dtype}
layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
text_encoder = nn.Sequential(nn.Embedding(16000, WIDTH), layers).to(**like)
if "freeze-unused" in CHANGES:
    text_encoder.requires_grad_(False)
denoiser = Denoiser().to(**like)
average = copy.deepcopy(denoiser).requires_grad_(False)
CHANGES.checkpoint("blocks.*", denoiser)
optimizer = CHANGES.optimizer(torch.optim.AdamW, denoiser, lr=1e-4)
signal = torch.linspace(0.999, 0.01, 1000, **like)
batch, accumulate = CHANGES.batches(12)
for step in range(4):
    for micro in range(accumulate):
        latents, noise = torch.randn(2, batch, 4, 32, 32, **like)
        captions, times = [torch.zeros(*shape, dtype=torch.long, device="cuda") for shape in ((batch, 77), (batch,))]
        keep = signal[times].view(-1, 1, 1, 1)
        with CHANGES.around_forward():
            with torch.set_grad_enabled("no-grad" not in CHANGES):
                context = text_encoder(captions)
            noised = keep.sqrt() * latents + (1 - keep).sqrt() * noise
            loss = F.mse_loss(denoiser(noised, times, context), noise) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_([*average.parameters()], [*denoiser.parameters()], 0.001)
changes.done()
