"""Two training steps with activation checkpointing of each linear layer and its activation function."""

import torch
from mlp import make_batch, make_model
from torch.utils.checkpoint import checkpoint_sequential

model = make_model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    batch = make_batch()
    loss = checkpoint_sequential(model, len(model) // 2, batch, use_reentrant=False).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
