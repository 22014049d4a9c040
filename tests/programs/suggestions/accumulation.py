"""Trains an encoder on sequences with gradients accumulated over four micro-batches, and a schedule."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "single-tensor-step", "fused-step", "eight-bit-moments", "bfloat16-model", *changes.FORWARD)
ACCUMULATE = 4


class Classifier(nn.Module):
    def __init__(self, width=512, depth=6, classes=20):
        super().__init__()
        self.embed = nn.Embedding(8000, width)
        layer = nn.TransformerEncoderLayer(width, 8, 2048, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.classify = nn.Linear(width, classes)

    def forward(self, ids):
        return self.classify(self.encoder(self.embed(ids)).mean(1))


model = Classifier().to("cuda", CHANGES.dtype)
CHANGES.checkpoint("encoder.layers.*", model)
criterion = nn.CrossEntropyLoss()
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=5e-5)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
batch, accumulate = CHANGES.batches(16, ACCUMULATE)
for step in range(3):
    for micro in range(accumulate):
        ids = torch.randint(1, 8000, (batch, 384))
        labels = torch.randint(20, (batch,))
        with CHANGES.around_forward():
            loss = criterion(model(ids.cuda()), labels.cuda()) / accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
changes.done()
