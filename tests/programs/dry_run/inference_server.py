"""A server's loop: requests of different sizes go through a sentence encoder in float16 under no_grad."""

import random

import torch
from transformers import RobertaConfig, RobertaModel

REQUESTS = 24


def embed(model, tokens, mask):
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = mask[:, :, None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=1).cpu()


def main():
    torch.manual_seed(0)
    random.seed(0)
    config = RobertaConfig(vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                           max_position_embeddings=514, pad_token_id=1)
    with torch.device("cuda"):
        model = RobertaModel(config, add_pooling_layer=False).half().eval()
    served = 0
    with torch.no_grad():
        for _ in range(REQUESTS):
            batch, length = random.choice([1, 4, 16, 64]), random.randrange(16, 512, 16)
            tokens = torch.randint(3, config.vocab_size, (batch, length)).to("cuda")
            served += len(embed(model, tokens, torch.ones_like(tokens)))
    print("served", served)


if __name__ == "__main__":
    main()
