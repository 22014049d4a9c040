"""PyTorch's recorder with space for 100 events, in the middle of training. Writes SNAPSHOT and prints the allocator's
statistics and the number of annotations in the snapshot."""

import json
import sys

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(64, 512, device="cuda")
kept = []
for i in range(6):
    if i == 2:
        torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(loss)
torch.cuda.synchronize()
torch.cuda.memory._dump_snapshot(sys.argv[1])
annotations = len(torch.cuda.memory._snapshot().get("external_annotations", []))
print(json.dumps({**torch.cuda.memory_stats(), "annotations": annotations}))
