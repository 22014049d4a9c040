"""Trains an LSTM language model with truncated backpropagation; the hidden state is carried from batch to batch."""
import changes
import torch
from torch import nn

torch.backends.cudnn.enabled = False
CHANGES = changes.parse("smaller-batches", "chunked-cross-entropy", *changes.ADAM, *changes.FORWARD)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=10000, width=650, layers=2):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.5)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids, targets, state):
        output, state = self.lstm(self.drop(self.embedding(ids)), state)
        return CHANGES.cross_entropy(self.decoder, self.drop(output), targets), state


def detach(state):
    return tuple(s.detach() for s in state)


model = LanguageModel().cuda()
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3)
batch, accumulate = CHANGES.batches(64)
states = [(torch.zeros(2, batch, 650, device="cuda"), torch.zeros(2, batch, 650, device="cuda")) for _ in range(accumulate)]
for step in range(3):
    for part in range(accumulate):
        text = torch.randint(10000, (71, batch), device="cuda")
        with CHANGES.around_forward():
            loss, state = model(text[:-1], text[1:], states[part])
        states[part] = detach(state)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
