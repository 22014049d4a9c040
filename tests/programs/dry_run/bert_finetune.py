"""BERT fine-tuned as a classifier: a DataLoader with page-locked batches of different lengths, warm-up, an evaluation."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

BATCH, EXAMPLES = 32, 160


def collate(batch):
    tokens = pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.tensor([label for _, label in batch])}


def main():
    torch.manual_seed(0)
    config = BertConfig(num_labels=3)
    examples = [(torch.randint(1, config.vocab_size, (int(length),)), int(length) % 3) for length in torch.randint(64, 385, (EXAMPLES,))]
    loader = DataLoader(examples, batch_size=BATCH, shuffle=True, collate_fn=collate, pin_memory=True)
    model = BertForSequenceClassification(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(loader))
    model.train()
    for step, batch in enumerate(loader):
        batch = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            print(f"step {step}: the loss is not finite")
        print(f"step {step}: length {batch['input_ids'].size(1)}, loss {loss.item():.4f}")

    model.eval()
    predictions = []
    with torch.no_grad():
        for batch in DataLoader(examples, batch_size=2 * BATCH, collate_fn=collate):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            predictions.append(model(**batch).logits.argmax(dim=-1).cpu())
    print("predictions", len(torch.cat(predictions)))


if __name__ == "__main__":
    main()
