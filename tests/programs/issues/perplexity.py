"""Trains a little, then sums the loss over a held-out set as tensors instead of numbers."""
# issue: graph-kept
import torch
import torch.nn as nn

model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())  # issue here


for step in range(5):
    loss = loss_of(torch.zeros(4, 128, dtype=torch.long, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
total = 0
for batch in range(12):
    total += loss_of(torch.ones(4, 128, dtype=torch.long, device="cuda"))  # issue here
print(total.shape)
