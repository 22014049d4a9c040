"""Trains a shallow language model with a large vocabulary, whose logits are most of the memory."""
# limits: 2000M 3000M
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "chunked-cross-entropy", "bfloat16-model", *changes.ADAM, *changes.FORWARD)
VOCABULARY, WIDTH, LENGTH = 50304, 384, 512


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=self.wpe.dtype)
        x = self.wte(ids) + self.wpe
        for block in self.h:
            x = block(x, mask, is_causal=True)
        return CHANGES.cross_entropy(self.lm_head, self.ln_f(x), labels)


model = LanguageModel().to("cuda", CHANGES.dtype)
CHANGES.checkpoint("h.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=6e-4, betas=(0.9, 0.95))
batch, accumulate = CHANGES.batches(8)
for step in range(3):
    for _ in range(accumulate):
        data = torch.randint(VOCABULARY, (batch, LENGTH + 1), device="cuda")
        with CHANGES.around_forward():
            loss = model(data[:, :-1], data[:, 1:])
        (loss / accumulate).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
changes.done()
