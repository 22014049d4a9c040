"""Sequences grow during the first half of the training and keep their length afterwards."""
# issue: none
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 256)
        self.layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(24):
    length = 32 + 16 * min(step, 10)
    ids = torch.zeros(8, length, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
