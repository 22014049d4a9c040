"""The model, one forward pass and one backward pass."""

from mlp import make_batch, make_model

model = make_model()
loss = model(make_batch()).sum()
loss.backward()
