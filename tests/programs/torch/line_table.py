"""One training step. With `memlab`, pytorch_memlab profiles the forward too, and its values are printed as JSON.

    line_table.py [memlab | snapshot FILE]
"""

import json
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.up(x)
        y = torch.relu(y)
        scratch = torch.empty(3 << 20, device="cuda")
        del scratch
        return x + self.down(y)


def work(model, batch):
    total = 0
    for part in batch.split(64):
        out = model(part)
        loss = out.square().mean()
        loss.backward()
        total = total + loss.detach()
    kept = torch.empty(1 << 20, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return total, kept


def main():
    model = nn.Sequential(Block(256), Block(256)).cuda()
    batch = torch.empty(192, 256, device="cuda")
    if sys.argv[1:2] == ["snapshot"]:
        torch.cuda.memory._record_memory_history()
    if sys.argv[1:2] != ["memlab"]:
        work(model, batch)
        if sys.argv[1:2] == ["snapshot"]:
            torch.cuda.memory._dump_snapshot(sys.argv[2])
        return
    from pytorch_memlab import LineProfiler

    with LineProfiler(work, Block.forward) as profiler:
        work(model, batch)
    columns = ["active_bytes.all.peak", "reserved_bytes.all.peak", "allocated_bytes.all.allocated", "allocated_bytes.all.freed"]
    figures = []
    for (name, line), row in profiler.display(columns=columns)._line_records.iterrows():
        active, reserved, allocated, freed = map(int, row)
        figures.append([name, int(line), active, reserved, allocated + freed])
    print(json.dumps(figures))


main()
