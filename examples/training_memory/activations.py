"""The model and one forward pass."""

from mlp import make_batch, make_model

model = make_model()
output = model(make_batch())
