"""wav2vec 2.0 large fine-tuned with CTC on 15 seconds of audio, with a frozen feature encoder, in float16 with a GradScaler."""

import numpy
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

BATCH, SECONDS, LABELS, STEPS = 8, 15, 100, 3


def main():
    torch.manual_seed(0)
    numpy.random.seed(0)
    config = Wav2Vec2Config(vocab_size=32, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, pad_token_id=0,
                            do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True, layerdrop=0.0, ctc_loss_reduction="mean")
    model = Wav2Vec2ForCTC(config).to("cuda")
    model.freeze_feature_encoder()
    model.train()
    optimizer, scaler = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4), torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        audio = torch.randn(BATCH, SECONDS * 16000, device="cuda")
        labels = torch.randint(1, 32, (BATCH, LABELS), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_values=audio, labels=labels).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
