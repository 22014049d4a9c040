"""Speech recognition: convolutions over a spectrogram, a bidirectional GRU over packed sequences, CTC loss."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, FRAMES, MELS, WIDTH, LETTERS, STEPS = 32, 1200, 80, 512, 29, 4


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 32, (11, 41), stride=(2, 2), padding=(5, 20)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
                                  nn.Conv2d(32, 32, (11, 21), stride=(1, 2), padding=(5, 10)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20))
        self.gru = nn.GRU(32 * MELS // 4, WIDTH, num_layers=4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, spectrograms, lengths):
        x = self.conv(spectrograms[:, None]).permute(0, 2, 1, 3).flatten(2)
        lengths = (lengths + 1) // 2
        x, _ = pad_packed_sequence(self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0], batch_first=True)
        return self.head(x).log_softmax(dim=-1), lengths


def main():
    torch.manual_seed(0)
    model = Recognizer().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    ctc = nn.CTCLoss(zero_infinity=True)
    for step in range(STEPS):
        lengths = torch.randint(FRAMES // 2, FRAMES + 1, (BATCH,))
        lengths[0] = FRAMES
        spectrograms = torch.randn(BATCH, FRAMES, MELS).to("cuda")
        transcripts = torch.randint(1, LETTERS, (BATCH, 100)).to("cuda")
        logs, lengths = model(spectrograms, lengths)
        loss = ctc(logs.transpose(0, 1), transcripts, lengths, torch.full((BATCH,), 100))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
