"""Allocates a 70 GiB tensor without host memory, then checks the memory in use after four threads allocate.

Needs SIMCUDA_MEMORY=80G."""
import resource
import threading

import torch

x = torch.zeros(70 << 30, dtype=torch.uint8, device="cuda")
assert torch.cuda.mem_get_info() == (10 << 30, 80 << 30)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20, "KiB"
del x
torch.cuda.empty_cache()


def work():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3000):
            a = torch.empty((i * 7919) % 3_000_000 + 1, device="cuda")
            b = a * 2
            del a, b


threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
free, total = torch.cuda.mem_get_info()
assert torch.cuda.memory_allocated() == 0 and total - free == torch.cuda.memory_reserved()
