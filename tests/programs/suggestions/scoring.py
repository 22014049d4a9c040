"""Scores long texts with a language model of transformers, without gradients."""
# packages: transformers==4.56.2 huggingface-hub==0.35.3 tokenizers==0.22.1 regex==2025.9.18 safetensors==0.6.2 pyyaml==6.0.2 requests==2.32.5 tqdm==4.67.1 packaging==25.0 urllib3==2.5.0 idna==3.10 certifi==2025.8.3 charset-normalizer==3.4.3 hf-xet==1.1.10
import changes
import torch
import transformers

CHANGES = changes.parse("no-kv-cache", "half-the-batch", "smaller-evaluation-batch")

config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048
)
model = transformers.LlamaForCausalLM(config).cuda().eval()
if "no-kv-cache" in CHANGES:
    model.config.use_cache = False
batch, turns = (4, 8) if "half-the-batch" in CHANGES or "smaller-evaluation-batch" in CHANGES else (8, 4)
scores = []
for _ in range(turns):
    tokens = torch.randint(512, (batch, 1024)).cuda()
    with torch.no_grad():
        outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
    scores.append(outputs.loss.item())
changes.done()
