"""DeepSpeed ZeRO-3 on two ranks: a Llama with 1.2 billion parameters in bfloat16."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH, STEPS = 4, 2048, 3
OPTIONS = {
    "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
}


def main():
    torch.manual_seed(0)
    deepspeed.init_distributed()
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                         num_key_value_heads=4, use_cache=False)
    with deepspeed.zero.Init(config_dict_or_path=OPTIONS):
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=OPTIONS, model_parameters=model.parameters())
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (BATCH, LENGTH), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
