"""Children and replaced images read their own recording."""

import os
import sys

import gpu_memtrace
import torch

if len(sys.argv) > 1:
    # The second image of this process has a trace file of its own.
    torch.zeros(1 << 20, device="cuda")
    kept = torch.zeros(3 << 18, device="cuda")
    assert gpu_memtrace.current()[0].allocated_bytes == torch.cuda.memory_allocated() == 3 << 20
    print(sorted(path.name for path in gpu_memtrace.run_folder().glob("*.mtr")) == sorted(
        [f"{os.getpid()}.mtr", f"{os.getpid()}.1.mtr", f"{sys.argv[1]}.mtr"]
    ))
    print("done")
    sys.exit()

host = torch.zeros(10)
child = os.fork()
if child == 0:
    # CUDA was not used before, so a child may use it.
    assert len(gpu_memtrace.current()) == 0
    kept = torch.zeros(1 << 18, device="cuda")
    memory = gpu_memtrace.current()
    assert memory[0].allocated_bytes == torch.cuda.memory_allocated() == 1 << 20, memory
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
kept = torch.zeros(1 << 19, device="cuda")
assert gpu_memtrace.current()[0].allocated_bytes == 2 << 20
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, __file__, str(child)])
