"""Llama-3.1-8B in bfloat16: 8 prompts of 2,048 tokens, 32 new tokens each, by transformers' generate()."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, PROMPT, NEW = 8, 2048, 32


def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, max_position_embeddings=131072, pad_token_id=0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
        prompts = torch.randint(1, config.vocab_size, (BATCH, PROMPT))
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    print("tokens", tuple(tokens.shape))


if __name__ == "__main__":
    main()
