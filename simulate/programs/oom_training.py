"""Out of memory in a training loop: the error comes when the device is full, and the process continues."""
import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(8192, 8192, device="cuda") for _ in range(12)])
optimizer = torch.optim.Adam(model.parameters())
try:
    for step in range(3):
        model(torch.randn(4096, 8192, device="cuda")).sum().backward()
        optimizer.step()
    raise AssertionError("parameters, gradients and two moments of 3 GiB each do not fit 8 GiB")
except torch.cuda.OutOfMemoryError as error:
    assert "CUDA out of memory" in str(error)
free, total = torch.cuda.mem_get_info()
assert total - free == torch.cuda.memory_reserved() and torch.cuda.max_memory_allocated() > 6 << 30
del model, optimizer
torch.cuda.empty_cache()
assert torch.empty(1024, device="cuda").is_cuda
