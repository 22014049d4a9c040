"""A tagger over an LSTM-free encoder. Its trainer clears the gradients of a model that it does not train."""
# issue: gradients-not-cleared
import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4000, 256)
        self.layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.head = nn.Linear(256, 40)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


class Loop:
    def __init__(self, model, teacher):
        self.model, self.teacher = model, teacher
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def fit(self, steps):
        for _ in range(steps):
            self.teacher.zero_grad()
            ids = torch.zeros(16, 128, dtype=torch.long, device="cuda")
            with torch.no_grad():
                target = self.teacher(ids)
            loss = nn.functional.mse_loss(self.model(ids), target)
            self.update(loss)

    def update(self, loss):
        loss.backward()  # issue here
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


Loop(Encoder().cuda(), Encoder().cuda()).fit(9)
