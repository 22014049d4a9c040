"""Speech recognition with torchaudio's Conformer and CTC, as in NeMo's recipes: 20 seconds of log-mel features."""

import torch
from torchaudio.models import Conformer

BATCH, FRAMES, MELS, WIDTH, TOKENS, LABELS, STEPS = 16, 500, 80, 512, 1025, 80, 3


class Recognizer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sample = torch.nn.Sequential(torch.nn.Conv2d(1, 256, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(256, 256, 3, 2, 1), torch.nn.ReLU())
        self.project = torch.nn.Linear(256 * MELS // 4, WIDTH)
        self.encoder = Conformer(WIDTH, 8, 4 * WIDTH, 17, 31, dropout=0.1)
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, features, lengths):
        x = self.sample(features[:, None]).permute(0, 2, 1, 3).flatten(2)
        x, lengths = self.encoder(self.project(x), lengths)
        return self.head(x).log_softmax(-1), lengths


def main():
    torch.manual_seed(0)
    model = Recognizer().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        features = torch.randn(BATCH, 4 * FRAMES, MELS).to("cuda")
        lengths = torch.full((BATCH, ), FRAMES).to("cuda")
        labels = torch.randint(1, TOKENS, (BATCH, LABELS)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logs, lengths = model(features, lengths)
        loss = torch.nn.functional.ctc_loss(logs.float().transpose(0, 1), labels, lengths, torch.full((BATCH, ), LABELS).to("cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
