"""The model alone."""

from mlp import make_model

model = make_model()
