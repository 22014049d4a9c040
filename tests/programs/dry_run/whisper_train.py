"""Whisper (small): speech recognition trained on log-mel features of 30 seconds."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

BATCH, LABELS, STEPS = 8, 128, 3


def main():
    torch.manual_seed(0)
    config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
                           encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False)
    model = WhisperForConditionalGeneration(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for step in range(STEPS):
        features = torch.randn(BATCH, config.num_mel_bins, 3000).to("cuda")
        labels = torch.randint(config.vocab_size, (BATCH, LABELS)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_features=features, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
