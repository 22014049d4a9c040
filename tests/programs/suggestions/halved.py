"""Builds an encoder in float32 on the GPU, converts it to float16, and embeds sentences."""
import contextlib

import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("final-data-type", "half-the-batch", "smaller-evaluation-batch")


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, width=1024, depth=8):
        super().__init__()
        self.tokens = nn.Embedding(20000, width)
        self.layers = nn.Sequential(*(Feed(width) for _ in range(depth)))

    def forward(self, ids):
        return self.layers(self.tokens(ids)).mean(1)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


with torch.device("cuda"), default_dtype(torch.float16 if "final-data-type" in CHANGES else torch.float32):
    model = Encoder()
model.half().eval()
batch, turns = (16, 8) if "half-the-batch" in CHANGES or "smaller-evaluation-batch" in CHANGES else (32, 4)
embedded = []
with torch.inference_mode():
    for _ in range(turns):
        ids = torch.randint(20000, (batch, 64)).cuda()
        embedded.append(model(ids).cpu())
changes.done()
