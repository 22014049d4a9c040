"""Preference optimization of a Qwen2.5-0.5B with TRL's DPOTrainer and a reference model, in bfloat16."""

import tempfile

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

from tokens import tokenizer

BATCH, WORDS, STEPS = 4, 300, 3


def main():
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                         tie_word_embeddings=True)
    model, reference = (Qwen2ForCausalLM(config).to(torch.bfloat16) for _ in range(2))
    text = " ".join(f"w{number % 900}" for number in range(WORDS))
    rows = Dataset.from_dict({name: [text] * (BATCH * STEPS) for name in ("prompt", "chosen", "rejected")})
    with tempfile.TemporaryDirectory() as folder:
        options = DPOConfig(folder, per_device_train_batch_size=BATCH, max_steps=STEPS, bf16=True, logging_steps=1, save_strategy="no", report_to=[],
                            gradient_checkpointing=True, max_length=1024)
        DPOTrainer(model, reference, options, train_dataset=rows, processing_class=tokenizer(config.vocab_size)).train()


if __name__ == "__main__":
    main()
