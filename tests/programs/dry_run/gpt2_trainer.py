"""GPT-2 with the Trainer of transformers: bfloat16, gradient checkpointing, gradient accumulation, an evaluation."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 1024


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(50257, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, per_device_eval_batch_size=4, gradient_accumulation_steps=2, max_steps=3, bf16=True,
            gradient_checkpointing=True, learning_rate=3e-4, logging_steps=1, save_strategy="no", eval_strategy="steps", eval_steps=3,
            prediction_loss_only=True, report_to="none", disable_tqdm=True)
        Trainer(model=model, args=arguments, train_dataset=Tokens(64), eval_dataset=Tokens(8)).train()


if __name__ == "__main__":
    main()
