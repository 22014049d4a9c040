"""Batches sorted by length: each is longer than the one before, until the program ends with an evaluation."""

# issue: none

import torch
import torch.nn as nn

model = nn.Sequential(nn.Embedding(2000, 256), nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), nn.Linear(256, 2000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    ids = torch.zeros(8, 32 + 16 * step, dtype=torch.long, device="cuda")
    weights = torch.ones(8, 32 + 16 * step, 2000, device="cuda")
    logits = model(ids)
    loss = (logits * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    for _ in range(3):
        model(torch.zeros(8, 64, dtype=torch.long, device="cuda"))
