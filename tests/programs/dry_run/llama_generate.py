"""Text generation with a Llama of one billion parameters in bfloat16: 128 new tokens for a batch of prompts."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BATCH, PROMPT, NEW = 8, 512, 128


def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                         num_key_value_heads=4, max_position_embeddings=2048)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    prompts = torch.randint(3, config.vocab_size, (BATCH, PROMPT)).to("cuda")
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=50, eos_token_id=2, pad_token_id=0, bos_token_id=1)
    with torch.inference_mode():
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
    print("generated", tuple(output.shape), "last token", output[0, -1].item())


if __name__ == "__main__":
    main()
