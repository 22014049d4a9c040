"""Reading ends in time although the launcher is stopped or has ended."""

import os
import signal
import sys
import time

import gpu_memtrace
import torch
from gpu_memtrace import _recording

launcher = os.getppid()
kept = torch.zeros(1 << 18, device="cuda")
assert gpu_memtrace.current()[0].allocated_bytes == 1 << 20
_recording.FLUSH_TIMEOUT_MS = 300
os.kill(launcher, signal.SIGSTOP)
more = torch.zeros(1 << 18, device="cuda")
try:
    gpu_memtrace.current()
except gpu_memtrace.RecordingError as error:
    assert "has not written the trace" in str(error), error
else:
    raise AssertionError("the launcher cannot have written anything")
_recording.FLUSH_TIMEOUT_MS = 60_000
os.kill(launcher, signal.SIGCONT)
assert gpu_memtrace.current()[0].allocated_bytes == 2 << 20
if sys.argv[1:] == ["kill"]:
    os.kill(launcher, signal.SIGKILL)
    began = time.monotonic()
    # Only the events on disk exist.
    assert gpu_memtrace.current()[0].allocated_bytes == 2 << 20
    assert time.monotonic() - began < 30
print("done", flush=True)
