"""Inference over chunks of documents: an index keeps one state in three, the rest is freed, a matrix is allocated."""
# issue: fragmentation
import torch
import torch.nn as nn


class Index:
    def __init__(self):
        self.rows = []

    def add(self, states):
        self.rows.extend(states[::3])


@torch.no_grad()
def embed(model, index, chunks):
    for chunk in range(chunks):
        index.add([model(torch.randn(1536, 1024, device="cuda")) for _ in range(30)])  # issue here
        torch.randn(8 + chunk, 1024, 1024, device="cuda").sum()


model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(inplace=True)).cuda()
index = Index()
embed(model, index, 4)
print(len(index.rows), torch.cuda.memory_reserved())
