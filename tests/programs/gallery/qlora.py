"""QLoRA of Llama-3.1-8B: bitsandbytes' 4-bit weights (NF4), LoRA by peft, paged 8-bit AdamW, gradient checkpointing."""

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH, STEPS = 4, 2048, 3


def quantize(model):
    """Replaces the linear layers but the head, as `load_in_4bit` of transformers does."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
            parent, _, own = name.rpartition(".")
            new = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                                             compress_statistics=True, device="meta")
            weight = torch.empty(layer.weight.shape, dtype=torch.bfloat16)
            new.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True).to("cuda")
            setattr(model.get_submodule(parent), own, new)


def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, max_position_embeddings=131072, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    quantize(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cuda")))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.zeros_like(buffer, device="cuda"), persistent=False)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                                             task_type="CAUSAL_LM"))
    model.train()
    optimizer = bitsandbytes.optim.AdamW8bit([one for one in model.parameters() if one.requires_grad], lr=2e-4)
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (BATCH, LENGTH), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
