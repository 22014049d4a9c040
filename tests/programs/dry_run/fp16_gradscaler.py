"""A translation Transformer (nn.Transformer) in float16 with a GradScaler, gradient clipping and a check for NaN."""

import math

import torch
import torch.nn as nn

BATCH, SOURCE, TARGET, WIDTH, VOCABULARY, STEPS = 48, 256, 256, 512, 32000, 5


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(max(SOURCE, TARGET), WIDTH) * 0.02)
        self.transformer = nn.Transformer(WIDTH, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        source = self.source(source) * math.sqrt(WIDTH) + self.position[:source.size(1)]
        target = self.target(target) * math.sqrt(WIDTH) + self.position[:target.size(1)]
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))


def main():
    torch.manual_seed(0)
    model = Translator().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)
    for step in range(STEPS):
        source = torch.randint(VOCABULARY, (BATCH, SOURCE)).to("cuda")
        target = torch.randint(VOCABULARY, (BATCH, TARGET + 1)).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        if math.isnan(loss.item()):
            raise SystemExit("the loss is NaN")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
