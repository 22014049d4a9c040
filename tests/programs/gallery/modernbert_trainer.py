"""ModernBERT-large fine-tuned as a classifier by the Trainer of transformers, in bfloat16."""

import tempfile

import torch
from transformers import ModernBertConfig, ModernBertForSequenceClassification, Trainer, TrainingArguments

BATCH, LENGTH, STEPS = 16, 512, 3


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, index):
        tokens = torch.randint(50000, (LENGTH, ))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": index % 3}


def main():
    torch.manual_seed(0)
    config = ModernBertConfig(hidden_size=1024, intermediate_size=2624, num_hidden_layers=28, num_attention_heads=16, num_labels=3)
    model = ModernBertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, per_device_train_batch_size=BATCH, max_steps=STEPS, bf16=True, logging_steps=1, save_strategy="no",
                                    report_to=[], dataloader_pin_memory=True)
        Trainer(model, options, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()
