"""Pinned (page-locked) host memory: pin_memory(), the caching host allocator, busy copies, a registered tensor."""

import torch
import oracle

oracle.start()
torch.empty(1, device="cuda")
stats = lambda: torch.cuda.host_memory_stats()
pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (1, 1000, 1 << 20, (5 << 20) + 1, 33 << 20)]
copies = [p.to("cuda", non_blocking=True) for p in pinned]
del pinned[1:4]
again = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
plain = torch.zeros(1 << 20).pin_memory()
own = torch.zeros(1 << 16)
runtime = torch.cuda.cudart()
assert int(runtime.cudaHostRegister(own.data_ptr(), own.nbytes, 0)) == 0
assert int(runtime.cudaHostUnregister(own.data_ptr())) == 0
torch.cuda.synchronize()
torch._C._host_emptyCache()
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
