"""Trains a policy by the log probabilities of sampled tokens, those of the old policy computed without gradients."""
import changes
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHANGES = changes.parse("chunked-cross-entropy", "checkpoint-layers", "offload-activations", *changes.ADAM)
VOCABULARY, WIDTH = 24000, 384


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 6, 768, batch_first=True, dropout=0.0) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def sampled(head, hidden, ids):
    logits = head(hidden).float()
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def log_probabilities(model, ids):
    hidden = model(ids)
    if "chunked-cross-entropy" not in CHANGES:
        return sampled(model.head, hidden, ids)
    parts = zip(hidden.chunk(changes.CHUNKS), ids.chunk(changes.CHUNKS))
    return torch.cat([checkpoint(sampled, model.head, h, i, use_reentrant=False) for h, i in parts])


model = Policy().cuda()
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-6)
for step in range(4):
    ids = torch.zeros(8, 384, dtype=torch.long, device="cuda")
    with torch.no_grad():
        old = log_probabilities(model, ids)
    with CHANGES.around_forward():
        new = log_probabilities(model, ids)
        loss = -(torch.exp(new - old) * torch.randn(8, 1, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del old, new, loss
changes.done()
