"""Prints what a PyTorch program can see of itself and of its GPU; it must be the same with and without memtrace."""

import os
import random
import resource
import signal
import sys
import threading
import warnings

import torch

warnings.simplefilter("always")
print(sys.argv[1:], sys.flags, os.getcwd(), os.umask(0o22))
print(sorted(k for k in os.environ if k not in ("LD_PRELOAD", "MEMTRACE_SESSION", "NVTX_INJECTION64_PATH", "SIMCUDA_LEDGER")))


def state():
    print([(s.name, str(signal.getsignal(s))) for s in signal.valid_signals() if isinstance(s, signal.Signals)])
    print(len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
    print([resource.getrlimit(i) for i in range(16)], os.getpriority(os.PRIO_PROCESS, 0))
    print(random.random(), torch.rand(3), torch.is_grad_enabled(), torch.cuda.is_available())
    print(torch.autograd._profiler_enabled(), torch._C._autograd._profiler_type(), torch.cuda.mem_get_info())


random.seed(1)
torch.manual_seed(1)
state()
layer = torch.nn.Linear(1000, 1000, device="cuda")
layer(torch.empty(50, 1000, device="cuda")).sum().backward()
state()
for size in 1 << 33, 1 << 36, 1 << 50:
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)
print(torch.cuda.memory_summary())
print({k: v for k, v in torch.cuda.memory_stats().items()})
print(torch.cuda.memory_snapshot()[0]["total_size"], torch.cuda.memory._snapshot()["device_traces"])
state()
