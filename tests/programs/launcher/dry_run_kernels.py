"""Calls kernels of FlashInfer: compiled ones, and others that only nvcc could compile. Prints the chosen tokens, and what failed."""

import json

import torch
from flashinfer.jit import JitSpec

assert JitSpec("compiled", compiled=7).build_and_load() == 7
probabilities = torch.rand(3, 1000, device="cuda")
tokens = torch.empty(3, dtype=torch.int32, device="cuda")
found = {}
try:
    module = JitSpec("sampling").build_and_load()
    for _ in range(2):
        module.top_p_sampling_from_probs(probabilities, tokens, None, 0.9)
    module.softmax(probabilities, probabilities)
    found["tokens"] = tokens.tolist()
except RuntimeError as error:
    found["error"] = str(error)
print(json.dumps(found))
