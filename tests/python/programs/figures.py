"""Compares the figures of the API with PyTorch's own, at several points in time."""

import json
import pickle
import sys
import threading
import time

import gpu_memtrace
import torch


def check() -> None:
    now, most = gpu_memtrace.current(), gpu_memtrace.peak()
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device) == 0:
            continue
        assert now[device].allocated_bytes == torch.cuda.memory_allocated(device), (now, device)
        assert now[device].reserved_bytes == torch.cuda.memory_reserved(device), (now, device)
        assert most[device].allocated_bytes == torch.cuda.max_memory_allocated(device), (most, device)
        assert sum(now[device].by_category.values()) == now[device].allocated_bytes
    assert now.allocated_bytes == sum(torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count()))


def build() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    return model.cuda()


assert gpu_memtrace.is_recording()
assert len(gpu_memtrace.current()) == 0, "nothing was allocated yet"
assert gpu_memtrace.lines(build) == []
assert len(gpu_memtrace.tensors().devices) == 0
model = build()
check()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(torch.randn(16, 256, device="cuda")).sum()
    check()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
del loss
other = torch.zeros(1 << 20, device="cuda:1")
check()
categories = gpu_memtrace.current()[0].by_category
parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
# Blocks are rounded up to 512 bytes.
assert parameters <= categories["parameter"] < parameters + 4 * 512, categories
assert categories["optimizer_state"] >= 2 * parameters, categories

# Every event that was published before the call is there, although another thread goes on.
stop = threading.Event()


def allocate() -> None:
    while not stop.is_set():
        torch.empty(1 << 16, device="cuda:1")
        time.sleep(0.001)


thread = threading.Thread(target=allocate, daemon=True)
thread.start()
for i in range(20):
    kept = torch.empty((i + 1) << 12, device="cuda:0")
    assert gpu_memtrace.current()[0].allocated_bytes == torch.cuda.memory_allocated(0)
stop.set()
thread.join()
del kept
check()

rows = {row.text.strip(): row for row in gpu_memtrace.lines(build)}
row = rows["return model.cuda()"]
assert row.allocated_bytes == categories["parameter"] and row.allocations == 4 and row.times == 1, row
assert row.statistics == {}

path = gpu_memtrace.snapshot(sys.argv[1])
with open(path, "rb") as file:
    snapshot = pickle.load(file)
ours = {b["address"] for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"}
theirs = set()
for segment in torch.cuda.memory_snapshot():
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            theirs.add(address)
        address += block["size"]
assert ours == theirs and ours

# The ending selects the format.
summary = json.loads(gpu_memtrace.snapshot(sys.argv[1] + ".json").read_text())
totals = {d["device"]: d["end"]["totals"] for d in summary["processes"][0]["devices"]}
assert {d: t["allocated_bytes"] for d, t in totals.items()} == {d: torch.cuda.memory_allocated(d) for d in range(2)}
assert summary["problems"] == []
assert gpu_memtrace.snapshot(sys.argv[1] + ".html").read_bytes().startswith(b"<!DOCTYPE html>")
assert "Allocated" in gpu_memtrace.snapshot(sys.argv[1] + ".txt").read_text()
for wrong in ("x.foo", "snapshot", "x.json.gz"):
    try:
        gpu_memtrace.snapshot(sys.argv[1] + wrong)
    except ValueError as error:
        assert "selects no format; use one of .pickle, .pkl, .html" in str(error), error
    else:
        raise AssertionError(f"{wrong} selects a format")
print("done")
