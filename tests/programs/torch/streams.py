"""Several streams with record_stream: frees complete later than they are requested (needs SIMCUDA_KERNEL_US > 0)."""

import torch
import oracle

oracle.start()
side = torch.cuda.Stream()
other = torch.cuda.Stream()
kept = []
for i in range(40):
    x = torch.empty((i % 5 + 1) << 20, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(5):
            y = x + 1
        x.record_stream(side)
    with torch.cuda.stream(other):
        z = torch.empty(3 << 18, device="cuda")
        z.mul_(2)
        z.record_stream(side)
    del x
    if i % 7 == 0:
        kept.append(y)
    if i == 20:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
del kept[::2]
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
