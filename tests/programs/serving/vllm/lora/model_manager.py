"""Slots for adapters, as vLLM makes them while it loads the model."""

import torch


class LoRAModelManager:
    RANK = 16

    def __init__(self, layers: int, width: int):
        self.slots = [self._create_lora_weights(width) for _ in range(layers)]

    def _create_lora_weights(self, width: int) -> tuple:
        shape = (4, 1, self.RANK, width)
        return tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
