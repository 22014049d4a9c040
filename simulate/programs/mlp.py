"""Forward, backward and Adam. On an H200, PyTorch 2.11 reports the same peak and reserved memory."""
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(256, 1024, device="cuda")
y = torch.randint(0, 10, (256,), device="cuda")
seen = []
for step in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
torch.cuda.synchronize()
assert seen[2] == seen[4] and seen[1][0] == seen[3][0], f"memory grows from step to step: {seen}"
peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
print(f"peak {peak:,} reserved {reserved:,} bytes")
free, total = torch.cuda.mem_get_info()
assert total - free == reserved, "the device's account is PyTorch's"
if torch.__version__.startswith("2.11."):
    assert (peak, reserved) == (489_624_576, 494_927_872), (peak, reserved)
