"""Megatron-core with tensor parallelism over two ranks: a GPT with 1.3 billion parameters, distributed optimizer, bfloat16."""

import os

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

BATCH, LENGTH, VOCABULARY, STEPS = 4, 1024, 51200, 3


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, tensor_model_parallel_size=2, bf16=True,
                               params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=False,
                               gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, parallel_output=True).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
        loss = model(tokens, places, mask, labels=tokens).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
