"""Trains a language model of transformers whose heads share keys and values."""
# packages: transformers==4.56.2 huggingface-hub==0.35.3 tokenizers==0.22.1 regex==2025.9.18 safetensors==0.6.2 pyyaml==6.0.2 requests==2.32.5 tqdm==4.67.1 packaging==25.0 urllib3==2.5.0 idna==3.10 certifi==2025.8.3 charset-normalizer==3.4.3 hf-xet==1.1.10
import changes
import torch
import transformers

CHANGES = changes.parse("no-kv-cache", "smaller-batches", "checkpoint-layers", "fused-step", "optimizer-in-backward", "eight-bit-moments", *changes.FORWARD)

config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024
)
model = transformers.LlamaForCausalLM(config).cuda()
CHANGES.checkpoint("layers.*", model=model.model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=1e-4)
batch, accumulate = CHANGES.batches(16)
# A checkpointed layer cannot fill a cache: its recomputation would fill it again.
cache = {"use_cache": False} if "no-kv-cache" in CHANGES or "checkpoint-layers" in CHANGES else {}
for _ in range(3):
    for _ in range(accumulate):
        tokens = torch.randint(512, (batch, 128)).cuda()
        with CHANGES.around_forward():
            outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, **cache)
        outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
