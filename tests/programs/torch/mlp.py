"""An MLP trained with Adam. With PyTorch 2.11, a real H200 and the simulated CUDA give the same peak, to the byte."""

import torch
import torch.nn as nn
import oracle

oracle.start()
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(256, 1024, device="cuda")
y = torch.randint(0, 10, (256,), device="cuda")
for i in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=(i % 2 == 0))
    loss.item()
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
