"""A language model of `transformers` generates text; prints its memory's categories, as categories.py does.

    generated.py dynamic|static
"""

import sys

import torch
import transformers

from purpose import note

config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
)
model = transformers.LlamaForCausalLM(config).cuda().eval()
if sys.argv[1] == "static":
    cache = transformers.StaticCache(config=config, max_cache_len=64)
else:
    cache = transformers.DynamicCache(config=config)
token = torch.zeros(2, 1, dtype=torch.long, device="cuda")
with torch.no_grad():
    for position in range(12):
        model(token, past_key_values=cache, use_cache=True, cache_position=torch.tensor([position], device="cuda"))
        for layer in cache.layers:
            note(layer.keys, "kv_cache")
            note(layer.values, "kv_cache")
    for parameter in model.parameters():
        note(parameter, "parameter")
print("peak", torch.cuda.max_memory_allocated())
