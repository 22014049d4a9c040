"""Courtesy moves tensors to the CPU and back: values, sharing and gradients stay."""

import torch
from gpu_memtrace.memlab import Courtesy

model = torch.nn.Linear(64, 64).cuda()
model(torch.ones(8, 64, device="cuda")).sum().backward()
base = torch.arange(100.0).cuda()
view = base[10:20]
transposed = torch.arange(6.0).reshape(2, 3).cuda().t()
pointers = {id(p): p for p in model.parameters()}
before = torch.cuda.memory_allocated()
host = {name: tensor.cpu().clone() for name, tensor in (("base", base), ("transposed", transposed), ("w", model.weight))}
with Courtesy():
    for tensor in (base, view, transposed, model.weight, model.bias, model.weight.grad):
        assert tensor.device.type == "cpu", tensor.device
    # Only what has no tensor stays: cuBLAS's workspaces, and what the graph has saved.
    assert torch.cuda.memory_allocated() <= before - 2 * model.weight.untyped_storage().nbytes()
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    base[10] = -1.0
    assert view[0] == -1.0
assert all(t.is_cuda for t in (base, view, transposed, model.weight, model.weight.grad, model.bias.grad))
assert torch.cuda.memory_allocated() == before
assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
assert view[0].item() == -1.0 and base[11].item() == 11.0
assert transposed.stride() == (1, 3) and torch.equal(transposed.cpu(), host["transposed"])
assert torch.equal(model.weight.detach().cpu(), host["w"].detach())
assert {id(p) for p in model.parameters()} == set(pointers)
model(torch.ones(8, 64, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("done")
