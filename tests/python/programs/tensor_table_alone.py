"""The table without memtrace: the total is the same, and the blocks without a tensor have no lines."""

import gpu_memtrace
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
loss = model(torch.randn(512, 64, device="cuda")).sum()
report = gpu_memtrace.tensors(model)
assert report["cuda:0"].used_bytes == torch.cuda.memory_allocated()
assert any(row.name == "a block without a tensor" for row in report["cuda:0"].rows), str(report)
assert "memtrace -- python train.py" in str(report)
print("done")
