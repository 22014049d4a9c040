"""A small Mixtral: a mixture of eight experts, two for each token, with the auxiliary loss of the router."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

BATCH, LENGTH, STEPS = 4, 1024, 3


def main():
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=32000, hidden_size=768, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
                           num_local_experts=8, num_experts_per_tok=2, output_router_logits=True, max_position_embeddings=LENGTH, use_cache=False)
    with torch.device("cuda"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (BATCH, LENGTH)).to("cuda")
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {output.loss.item():.4f}, router {output.aux_loss.item():.4f}")


if __name__ == "__main__":
    main()
