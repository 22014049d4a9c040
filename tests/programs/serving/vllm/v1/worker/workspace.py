"""The workspace of kernels: it grows in the profiling run, and stays."""

import torch


class WorkspaceManager:
    def __init__(self):
        self._current = None

    def get(self, shape: tuple) -> torch.Tensor:
        if self._current is None or len(self._current) < shape[0]:
            self._current = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return self._current[: shape[0]]
