"""Trains stacked LSTM layers on long sequences of audio tokens by truncated backpropagation."""
import changes
import torch
from torch import nn

CHANGES = changes.parse(
    "smaller-batches", "checkpoint-layers", "chunked-cross-entropy", "bfloat16-model", *changes.ADAM, *changes.FORWARD
)
BATCH, LENGTH, WINDOW, TOKENS, WIDTH = 12, 5120, 1024, 2048, 768


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)

    def forward(self, x, state):
        hidden, state = self.lstm(self.norm(x), state)
        return x + self.project(hidden), state


class AudioModel(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Recurrent(WIDTH) for _ in range(layers)])
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens, states):
        x, after = self.embed(tokens), []
        for layer, state in zip(self.layers, states):
            x, state = layer(x, state)
            after.append(state)
        return x, after


def detached(states):
    return [tuple(part.detach() for part in state) for state in states]


def train_on(song, model, optimizer, accumulate):
    rows = song.chunk(accumulate)
    states = [[None] * len(model.layers) for _ in rows]
    for start in range(0, LENGTH, WINDOW):
        for i, row in enumerate(rows):
            inputs, targets = row[:, start : start + WINDOW], row[:, start + 1 : start + WINDOW + 1]
            with CHANGES.around_forward():
                hidden, after = model(inputs, states[i])
                loss = CHANGES.cross_entropy(model.out, hidden, targets) / accumulate
            loss.backward()
            states[i] = detached(after)
            del hidden, after, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    model = AudioModel().to("cuda", CHANGES.dtype)
    CHANGES.checkpoint("layers.*", model)
    optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3)
    batch, accumulate = CHANGES.batches(BATCH)
    song = torch.zeros(batch * accumulate, LENGTH + 1, dtype=torch.long, device="cuda")
    train_on(song, model, optimizer, accumulate)
    changes.done()
