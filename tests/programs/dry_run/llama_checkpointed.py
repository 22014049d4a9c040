"""A Llama of 300 million parameters in bfloat16, with gradient checkpointing and fused AdamW."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

BATCH, LENGTH, STEPS = 4, 2048, 4


def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=20, num_attention_heads=16,
                         num_key_value_heads=8, max_position_embeddings=LENGTH, attn_implementation="sdpa", use_cache=False)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, STEPS)
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (BATCH, LENGTH)).to("cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
