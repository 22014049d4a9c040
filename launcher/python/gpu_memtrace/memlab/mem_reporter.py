"""The table of all tensors, with the interface of pytorch_memlab."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Dict, List, Optional

from gpu_memtrace._tensors import TensorReport, add_model, add_optimizer, report_of


class MemReporter:
    """Prints all tensors and their memory.

    ``model`` gives names to parameters. ``pre_collect`` collects garbage first. No model, optimizer or tensor is kept
    alive.
    """

    def __init__(self, model: Optional[Any] = None, pre_collect: bool = False) -> None:
        self.pre_collect = pre_collect
        self._model = None if model is None else weakref.ref(model)
        self._optimizers: List["weakref.ref[Any]"] = []

    def add_optimizer(self, optimizer: Any) -> None:
        """Gives names to the tensors of an optimizer's state."""
        self._optimizers.append(weakref.ref(optimizer))

    def collect(self) -> TensorReport:
        """The figures that :meth:`report` prints."""
        if self.pre_collect:
            gc.collect()
        names: Dict[int, str] = {}
        model = self._model() if self._model is not None else None
        if model is not None:
            add_model(names, model)
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                add_optimizer(names, optimizer)
        return report_of(names)

    def report(self, verbose: bool = False, device: Optional[Any] = None) -> None:
        """Prints the table of all devices or of one. ``verbose`` shows which tensors share memory."""
        print(self.collect().text(device, verbose), end="")
