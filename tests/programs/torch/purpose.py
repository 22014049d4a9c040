"""Prints the purpose of a program's memory for tests/tests/naming/categories.rs."""

import sys
import time


def note(tensor, category):
    """Prints that the tensor's memory has this category at this time."""
    if tensor is not None and tensor.is_cuda and tensor.untyped_storage().nbytes():
        # One write call, because several threads print.
        sys.stdout.write(f"{tensor.untyped_storage().data_ptr()} {time.time_ns()} {category}\n")
