"""Many equal layers, with a small batch and a large one. Prints the allocated bytes before each call in a layer. With
little memory (SIMCUDA_MEMORY=300M) the large batch's forward fails.

    deep.py plain|checkpoint [large]    checkpoint: torch.utils.checkpoint runs the layers; large: only the large batch
"""

import sys

import torch
from torch.utils.checkpoint import checkpoint

functional = torch.nn.functional


class Layer(torch.nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place
        self.norm, self.up, self.down = torch.nn.LayerNorm(256), torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def print_allocated(self, call, x):
        print("at", len(x), self.place, call, torch.cuda.memory_allocated(), flush=True)

    def forward(self, x):
        self.print_allocated("norm", x)
        hidden = self.norm(x)
        self.print_allocated("up", x)
        hidden = self.up(hidden)
        self.print_allocated("gelu", x)
        hidden = functional.gelu(hidden)
        self.print_allocated("down", x)
        hidden = self.down(hidden)
        self.print_allocated("add", x)
        return x + hidden


class Deep(torch.nn.Module):
    def __init__(self, saving):
        super().__init__()
        self.saving = saving
        self.layers = torch.nn.ModuleList(Layer(place) for place in range(12))
        self.head = torch.nn.Linear(256, 1)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.saving else layer(x)
        return self.head(x)


model = Deep(sys.argv[1] == "checkpoint").cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in (256, 4096)[sys.argv[2:] == ["large"] :]:
    inputs = torch.randn(batch, 256).cuda()
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
