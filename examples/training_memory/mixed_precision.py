"""Two training steps whose forward pass computes in bfloat16."""

import torch
from mlp import make_batch, make_model

model = make_model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(make_batch()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
