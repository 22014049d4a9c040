"""A transformer encoder under bf16 autocast with AdamW, gradient clipping, and an evaluation pass between steps."""

import torch
import torch.nn as nn
import oracle

oracle.start()
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
model = nn.TransformerEncoder(layer, 3).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(8, 128, 256, device="cuda")
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    model(x)
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
