"""Two devices, a copy between them, and threads that allocate on both at once (SIMCUDA_DEVICES=2)."""

import threading

import torch
import oracle

oracle.start()
a = torch.arange(1000).cuda(0)
b = a.to("cuda:1")
with torch.cuda.device(1):
    c = torch.empty(1 << 20, device="cuda")


def work(device):
    kept = []
    for i in range(500):
        x = torch.empty((i * 7919) % 300000 + 1, device=device)
        if i % 50 == 0:
            kept.append(x)
    return kept


threads = [threading.Thread(target=work, args=(f"cuda:{i % 2}",)) for i in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print("allocated", torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1))
oracle.finish()
