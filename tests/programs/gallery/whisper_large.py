"""Whisper large-v3 fine-tuned with AdamW in bfloat16 autocast and gradient checkpointing."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

BATCH, LABELS, STEPS = 8, 128, 3


def main():
    torch.manual_seed(0)
    config = WhisperConfig(vocab_size=51866, num_mel_bins=128, d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20,
                           decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, use_cache=False)
    with torch.device("cuda"):
        model = WhisperForConditionalGeneration(config)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(STEPS):
        features = torch.randn(BATCH, config.num_mel_bins, 3000, device="cuda")
        labels = torch.randint(config.vocab_size, (BATCH, LABELS), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_features=features, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
