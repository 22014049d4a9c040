"""Trains a word model on two devices by nn.DataParallel, with the loss of all results on the first one."""
# GPUs: 2
import changes
import torch
from torch import nn
from torch.nn import functional

CHANGES = changes.parse("loss-in-replicas", *changes.ADAM)
VOCABULARY, WIDTH = 16000, 256


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, labels):
        logits = self.head(self.body(self.embed(ids)))
        if "loss-in-replicas" in CHANGES:
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())[None]
        return logits


model = nn.DataParallel(Words().cuda(), device_ids=[0, 1])
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
for step in range(4):
    ids = torch.zeros(16, 128, dtype=torch.long, device="cuda")
    result = model(ids, ids)
    loss = result.mean() if "loss-in-replicas" in CHANGES else functional.cross_entropy(result.flatten(0, 1), ids.flatten())
    del result
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()
changes.done()
