"""native_stacks.py FILE: trains a little and writes the events of PyTorch's own recorder, with C++ frames, as JSON."""

import json
import sys

import torch

torch.cuda.memory._record_memory_history(stacks="all", max_entries=100_000)


def train():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


train()
with open(sys.argv[1], "w", encoding="utf-8") as out:
    json.dump(torch.cuda.memory._snapshot()["device_traces"][0], out)
