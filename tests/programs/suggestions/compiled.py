"""Trains a GPT each of whose blocks is compiled. The blocks share one compiled graph."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "offload-activations", *changes.ADAM)
BATCH, LENGTH, WIDTH, HEADS, DEPTH, VOCABULARY = 16, 512, 512, 8, 8, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        # The simulated CUDA has no Triton.
        self.blocks = nn.ModuleList(torch.compile(Block(), backend="aot_eager") for _ in range(DEPTH))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = GPT().cuda().to(CHANGES.dtype)
if "checkpoint-layers" in CHANGES:
    if CHANGES.action and "Block" not in CHANGES.action:
        changes.cannot(CHANGES.action)
    for block in model.blocks:
        block.forward = changes.checkpointed(block.forward)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model)
batch, accumulate = CHANGES.batches(BATCH)
for _ in range(3):
    for _ in range(accumulate):
        ids = torch.randint(VOCABULARY, (batch, LENGTH), device="cuda")
        with CHANGES.around_forward():
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
