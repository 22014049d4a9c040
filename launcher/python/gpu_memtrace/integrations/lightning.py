"""A callback of Lightning that logs the peak of GPU memory by category.

It is for ``lightning`` and for ``pytorch_lightning``, whichever the program has imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional

from gpu_memtrace.integrations._metrics import PeakMeter

if TYPE_CHECKING:
    # Lightning's types are unknown where it is not installed.
    class Callback: ...

elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class MemoryCallback(Callback):
    """Logs the peak of each training epoch, or of every ``every_n_steps`` optimizer steps.

    The metrics go to each logger of the trainer, as those of Lightning's DeviceStatsMonitor do. Nothing is allocated on
    a GPU.
    """

    def __init__(self, *, every_n_steps: Optional[int] = None, device: Optional[int] = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError("every_n_steps must be at least 1")
        self.every_n_steps = every_n_steps
        self._meter = PeakMeter("epoch" if every_n_steps is None else f"{every_n_steps} steps", device=device)
        self._logged_step = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.every_n_steps is None or not self._meter.is_started:
            self._meter.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = int(trainer.global_step)
        # With gradient accumulation, several batches have the same step.
        if self.every_n_steps is None or step == self._logged_step or step % self.every_n_steps:
            return
        self._logged_step = step
        self._log(trainer)
        self._meter.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.every_n_steps is None:
            self._log(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._meter.cancel()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._meter.cancel()

    def _log(self, trainer: Any) -> None:
        found = self._meter.stop()
        if found:
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
