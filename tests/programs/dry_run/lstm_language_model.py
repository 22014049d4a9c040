"""A word-level LSTM language model through cuDNN: truncated backpropagation through time."""

import torch
import torch.nn as nn

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, STEPS = 64, 128, 33278, 1024, 3, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, dropout=0.4, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


def main():
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    corpus = torch.randint(VOCABULARY, (BATCH, STEPS * LENGTH + 1)).cuda()
    hidden = (torch.zeros(LAYERS, BATCH, WIDTH, device="cuda"), torch.zeros(LAYERS, BATCH, WIDTH, device="cuda"))
    for step in range(STEPS):
        start = step * LENGTH
        tokens, targets = corpus[:, start:start + LENGTH], corpus[:, start + 1:start + LENGTH + 1]
        hidden = tuple(state.detach() for state in hidden)
        logits, hidden = model(tokens, hidden)
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
