"""Ends the program after some optimizer steps, as `memtrace dry-run --steps` requests."""

import sys
import weakref

from torch.optim import optimizer as optimizers


class Limit:
    """Counts the steps of each optimizer."""

    def __init__(self, steps):
        self.steps = steps
        self.counts = weakref.WeakKeyDictionary()

    def before_step(self, optimizer, *_):
        """Ends the program if this optimizer has made its steps, whatever others have."""
        if self.counts.get(optimizer, 0) >= self.steps:
            sys.exit(0)

    def after_step(self, optimizer, *_):
        """Ends the program if all optimizers that made steps have made enough."""
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if min(self.counts.values()) >= self.steps:
            sys.exit(0)


def install(steps):
    """Limits the steps of each optimizer; 0 is no limit."""
    if steps:
        limit = Limit(steps)
        optimizers.register_optimizer_step_pre_hook(limit.before_step)
        optimizers.register_optimizer_step_post_hook(limit.after_step)
