"""Steps a weather model over many hours without gradients, in one region of autocast."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("no-autocast-cache", "half-the-batch")
WIDTH = 1536


class Column(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state):
        return state + self.back(nn.functional.silu(self.mix(state)))


class Processor(nn.Module):
    def __init__(self, layers=10):
        super().__init__()
        self.columns = nn.ModuleList(Column() for _ in range(layers))

    def forward(self, state):
        for column in self.columns:
            state = column(state)
        return state


model = Processor().cuda().eval()
size, _ = CHANGES.batches(1024)
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled="no-autocast-cache" not in CHANGES):
    state = torch.randn(size, WIDTH, device="cuda")
    for hour in range(8):
        state = model(state)
changes.done()
