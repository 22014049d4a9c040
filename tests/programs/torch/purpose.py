"""How a program tells tests/tests/naming/categories.rs what its memory is for."""

import sys
import time


def note(tensor, category):
    """This memory is that, now."""
    if tensor is not None and tensor.is_cuda and tensor.untyped_storage().nbytes():
        # In one piece: threads speak, too.
        sys.stdout.write(f"{tensor.untyped_storage().data_ptr()} {time.time_ns()} {category}\n")
