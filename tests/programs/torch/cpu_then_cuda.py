"""A CPU tensor, a CUDA tensor and a CPU tensor, each with a unique size."""

import torch

before = torch.empty(1000003, dtype=torch.uint8)
device = torch.empty(1000000, dtype=torch.uint8, device="cuda")
after = torch.empty(1000033, dtype=torch.uint8)
