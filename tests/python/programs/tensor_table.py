"""The table of tensors: names, sharing, what has no tensor, and a total that is PyTorch's."""

import gc
import weakref

import gpu_memtrace
import torch


def check(report: gpu_memtrace.TensorReport) -> None:
    used = report["cuda:0"].used_bytes
    assert used == torch.cuda.memory_allocated() == report["cuda:0"].allocated_bytes, f"{used}\n{report}"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(256, 256, bias=False)
        self.second = torch.nn.Linear(256, 256, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x)))) * self.scale[0]


model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters())
check(gpu_memtrace.tensors())
model(torch.randn(8, 256, device="cuda")).sum().backward()
optimizer.step()
view = model.first.weight.detach()[3:5]
sparse = torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (9,), device="cuda")
half = torch.zeros(100, dtype=torch.float16, device="cuda")
nothing = torch.zeros(0, device="cuda")
loss = model(torch.randn(64, 256, device="cuda")).sum()  # its graph has saved buffers

report = gpu_memtrace.tensors(model, optimizer)
check(report)
rows = {row.name: row for row in report["cuda:0"].rows}
weight = rows["first.weight+second.weight"]
assert (weight.dtype, weight.shape, weight.used_bytes) == ("float32", (256, 256), 256 * 256 * 4), weight
gradient = rows["first.weight+second.weight.grad"]
assert gradient.used_bytes == weight.used_bytes
state = rows["Adam.first.weight+second.weight.exp_avg"]
assert state.used_bytes == weight.used_bytes
assert rows["scale"].used_bytes == 512, "as the allocator rounds"
shared = [row for row in rows.values() if row.shared_with == weight.name]
# A view keeps the tensor that it was made from.
assert [(row.shape, row.used_bytes) for row in shared] == [((256, 256), 0), ((2, 256), 0)], shared
assert any(row.dtype == "float16" and row.shape == (100,) for row in rows.values())
assert not any(row.shape == (0,) for row in rows.values())
# Memory that autograd has saved has no tensor in Python. The recording knows its line.
saved = [row for row in report["cuda:0"].rows if not row.is_tensor and row.name == "saved for backward"]
assert sum(row.used_bytes for row in saved) >= 64 * 256 * 4, report
assert all(row.allocated_at == "tensor_table.py:24" for row in saved), report
for row in report["cuda:0"].rows:
    # The recording classifies the same memory as the names do.
    if row.used_bytes and row.has_name:
        name = row.name
        want = "gradient" if name.endswith(".grad") else "optimizer_state" if "Adam" in name else "parameter"
        assert row.category == want or name == "scale", row
assert rows["Tensor3.values" if "Tensor3.values" in rows else "Tensor2.values"].numel == 2
text = str(report)
for expected in ("Element type", "Storage on cuda:0", f"(->{weight.name})", "Total elements", "Used memory"):
    assert expected in text, text
assert "(->" not in report.text("cuda:0", verbose=False)

# No reference is kept: everything is freed with its last user, without the garbage collector.
gc.collect()
gc.disable()
references = [weakref.ref(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
model_reference, optimizer_reference = weakref.ref(model), weakref.ref(optimizer)
counts = {id(t): __import__("sys").getrefcount(t) for t in (view, half, model.first.weight)}
before = torch.cuda.memory_allocated()
kept = gpu_memtrace.tensors(model, optimizer)
assert {id(t): __import__("sys").getrefcount(t) for t in (view, half, model.first.weight)} == counts
assert torch.cuda.memory_allocated() == before
del loss
assert torch.cuda.memory_allocated() < before, "the graph is freed at once"
del half, view, sparse
middle = torch.cuda.memory_allocated()
del optimizer
gc.collect()
del model
gc.collect()
assert model_reference() is None and optimizer_reference() is None
assert [r() for r in references if r() is not None] == [nothing]
left = gpu_memtrace.tensors()
# A device without memory in use has no table: PyTorch 2.15 keeps no workspace of cuBLAS.
tables = [table for name, table in left.devices.items() if name == "cuda:0"]
assert sum(table.used_bytes for table in tables) == torch.cuda.memory_allocated(), str(left)
assert not any(row.is_tensor for table in tables for row in table.rows), str(left)
print("done")
