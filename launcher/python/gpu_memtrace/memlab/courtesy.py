"""Moves the tensors of a program to the CPU for a while."""

from __future__ import annotations

import gc
import sys
from typing import Any, Dict, List, Set, Tuple


class Courtesy:
    """Gives GPU memory to other programs for a while: ``with Courtesy(): ...``.

    Moves the memory of all tensors to the CPU, with their gradients, and back. Tensors that share memory share it
    afterwards too. Buffers that autograd has saved, and other memory without a tensor, stay.
    """

    def __init__(self) -> None:
        self._moved: List[Tuple[Any, Any, Any]] = []

    def yield_memory(self) -> None:
        """Moves all CUDA tensors to the CPU, and releases the memory that PyTorch has cached."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        copies: Dict[Tuple[str, int], Any] = {}
        with torch.no_grad():
            for tensor in _with_gradients(torch):
                device = tensor.device
                try:
                    storage = tensor.untyped_storage()
                    key = (str(device), int(storage.data_ptr()))
                    if key not in copies:
                        copies[key] = storage.cpu()
                    moved = torch.empty(0, dtype=tensor.dtype).set_(
                        copies[key], tensor.storage_offset(), tensor.size(), tensor.stride()
                    )
                    _set_data(tensor, moved)
                except (RuntimeError, NotImplementedError, TypeError):
                    # A tensor without a storage of its own stays.
                    continue
                self._moved.append((tensor, device, key))
        copies.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Moves the tensors back to their devices."""
        torch: Any = sys.modules.get("torch")
        copies: Dict[Any, Any] = {}
        moved, self._moved = self._moved, []
        for tensor, device, key in moved:
            with torch.no_grad():
                if tensor.device == device:
                    continue
                if key not in copies:
                    copies[key] = tensor.untyped_storage().to(device=device)
                _set_data(
                    tensor,
                    torch.empty(0, dtype=tensor.dtype, device=device).set_(
                        copies[key], tensor.storage_offset(), tensor.size(), tensor.stride()
                    ),
                )

    def __enter__(self) -> "Courtesy":
        self.yield_memory()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def _set_data(tensor: Any, data: Any) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None and gradient.device != data.device:
        # PyTorch refuses a gradient on another device than its tensor.
        tensor.grad = None
    tensor.data = data
    if gradient is not None:
        _set_data(gradient, gradient.data.to(data.device))
        tensor.grad = gradient


def _with_gradients(torch: Any) -> List[Any]:
    """All CUDA tensors: those of the garbage collector."""
    seen: Set[int] = set()
    found: List[Any] = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.is_cuda and id(candidate) not in seen:
            seen.add(id(candidate))
            found.append(candidate)
    return found
