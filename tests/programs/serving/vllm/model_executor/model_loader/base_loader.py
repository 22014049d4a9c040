"""Builds a model and fills its weights, as vLLM's loader with dummy weights does."""

import torch


def load_model(layers: int, width: int) -> torch.nn.Module:
    """A stack of `layers` linear layers of `width` x `width` in bfloat16, on the GPU."""
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
                                      for _ in range(layers)])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.uniform_(-1e-3, 1e-3)
    return model
