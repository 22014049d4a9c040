"""A GPT-2-sized decoder (124 M parameters), AdamW, bf16 autocast. `small`: two layers, also over the simulated CUDA."""

import sys

import torch
import torch.nn.functional as F
import oracle
from decoder import GPT

small = "small" in sys.argv
layers, width, heads, vocabulary, context = (2, 256, 4, 1000, 64) if small else (12, 768, 12, 50257, 1024)
batch, steps = (2, 3) if small else (8, 5)

oracle.start()
model = GPT(layers, width, heads, vocabulary, context).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(steps):
    ids = torch.zeros(batch, context, dtype=torch.long).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().view(-1, vocabulary), ids.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
