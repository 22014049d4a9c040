"""T5 trained with Accelerate and Adafactor: bfloat16, accumulated gradients."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

BATCH, SOURCE, TARGET, EXAMPLES = 8, 512, 128, 48


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = T5Config(vocab_size=32128, d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, feed_forward_proj="gated-gelu", use_cache=False,
                      decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False)
    examples = [{"input_ids": torch.randint(2, 32100, (SOURCE,)), "labels": torch.randint(2, 32100, (TARGET,))} for _ in range(EXAMPLES)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples, batch_size=BATCH, shuffle=True))
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
