"""A callback of the Hugging Face Trainer that logs the peak of GPU memory by category."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional

from gpu_memtrace.integrations._metrics import PeakMeter

if TYPE_CHECKING:
    # The types of transformers are unknown where it is not installed.
    class TrainerCallback: ...

else:
    from transformers import TrainerCallback


class MemoryCallback(TrainerCallback):
    """Adds the peak since the last log to what the trainer logs: ``MemoryCallback().attach(trainer)``."""

    def __init__(self, *, device: Optional[int] = None) -> None:
        self._meter = PeakMeter("logging interval", device=device)

    def attach(self, trainer: Any) -> None:
        """Adds the callback before those that report to W&B, TensorBoard and others, so that they report it too."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Optional[Dict[str, Any]] = None, **kwargs: Any) -> None:
        # The trainer also logs the results of an evaluation, and sums at the end.
        if logs is None or "loss" not in logs:
            return
        found = self._meter.stop()
        self._meter.start()
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.cancel()
