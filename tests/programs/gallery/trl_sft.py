"""Supervised fine-tuning of a Qwen2.5-0.5B with TRL's SFTTrainer: bfloat16, packed sequences of 2,048 tokens."""

import tempfile

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from tokens import tokenizer

BATCH, LENGTH, STEPS = 4, 2048, 3


def main():
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                         tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    rows = Dataset.from_dict({"input_ids": torch.randint(1, 1000, (BATCH * STEPS, LENGTH)).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(folder, per_device_train_batch_size=BATCH, max_steps=STEPS, max_length=LENGTH, bf16=True, logging_steps=1,
                            save_strategy="no", report_to=[], gradient_checkpointing=True, dataset_kwargs={"skip_prepare_dataset": True})
        SFTTrainer(model, options, train_dataset=rows, processing_class=tokenizer(config.vocab_size)).train()


if __name__ == "__main__":
    main()
