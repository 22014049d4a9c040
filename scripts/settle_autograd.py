"""At the end of a program, waits until PyTorch's autograd threads sleep. `scripts/venv` adds it to test environments.

With PyTorch 2.15 and CPython up to 3.13, a program that ends right after a backward pass can abort: an autograd thread
still frees Python objects, and CPython ends a thread that asks for the GIL during the interpreter's end with
`pthread_exit`, through C++ frames that let no exception pass. docs/dev/dry-run.md has the measurements.
"""

import atexit
import os
import time


def _runs(thread):
    """Whether a thread of this process is an autograd thread that does not sleep."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file:
            name, _, state = file.read().partition("(")[2].rpartition(") ")
    except OSError:  # The thread has ended.
        return False
    return name.startswith("pt_autograd") and state[0] != "S"


def settle():
    """Returns when no autograd thread of this process runs, at the latest after about two seconds."""
    # A thread that waits for the GIL sleeps too: it gets the GIL while this one sleeps, and runs when it wakes.
    for _ in range(1000):
        time.sleep(0.002)
        if not any(_runs(thread) for thread in os.listdir("/proc/self/task")):
            break


atexit.register(settle)
