"""Compares the ledger with PyTorch's own counters, for every allocator backend. Needs SIMCUDA_LEDGER with %p."""
import json
import os
from collections import Counter

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
big = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
del big
torch.cuda.synchronize()
torch.cuda.empty_cache()
pinned = torch.empty(1000).pin_memory()
reserved = torch.cuda.memory_reserved()

with open(os.environ["SIMCUDA_LEDGER"].replace("%p", str(os.getpid()))) as file:
    lines = sorted(map(json.loads, file), key=lambda line: line["seq"])
assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1)), "no number is missing"
assert all(line["pid"] == os.getpid() for line in lines)
# PyTorch requests fabric handles first, and the simulation returns "not permitted".
refused = [line for line in lines if line["result"] != 0]
assert all((line["api"], line["result"]) == ("cuMemCreate", 800) for line in refused) and len(refused) <= 1, refused
lines = [line for line in lines if line["result"] == 0]
count = Counter(line["api"] for line in lines)

# Both layers count the same live allocations, and no live address is returned twice.
live = {}
for line in lines:
    api, layer, address = line["api"], line["layer"], line.get("addr")
    if api in ("cudaMalloc", "cuMemAlloc_v2", "cudaMallocAsync", "cuMemAllocAsync", "cudaHostAlloc", "cuMemHostAlloc"):
        assert (layer, address) not in live, f"{api} gave out {address} twice"
        live[layer, address] = line["size"]
    elif api in ("cudaFree", "cuMemFree_v2", "cudaFreeAsync", "cuMemFreeAsync") and address:
        assert live.pop((layer, address)) == line["size"]
by_layer = {layer: sorted(size for (l, _), size in live.items() if l == layer) for layer in ("driver", "runtime")}
assert by_layer["driver"] == by_layer["runtime"], by_layer
host = [line for line in lines if line["api"] in ("cudaHostAlloc", "cuMemHostAlloc")]
assert len(host) == 2 and host[0]["nested"] and host[0]["addr"] == host[1]["addr"] == pinned.data_ptr()

conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
device_bytes = sum(by_layer["runtime"]) - host[0]["size"]
if "expandable_segments:True" in conf:
    created = {}
    for line in lines:
        if line["api"] == "cuMemCreate":
            assert line["handle"] not in created and "nested" not in line
            created[line["handle"]] = line["size"]
        elif line["api"] == "cuMemRelease":
            assert created.pop(line["handle"]) == line["size"]
        elif line["api"] == "cuMemMap":
            assert created[line["handle"]] == line["size"]
    assert sum(created.values()) == reserved and device_bytes == 0
    assert count["cuMemMap"] - count["cuMemUnmap"] == len(created) and count["cuMemUnmap"] > 0
elif "cudaMallocAsync" in conf:
    assert count["cudaMallocAsync"] == count["cuMemAllocAsync"] > 0 and count["cudaMalloc"] == 0
    # With this backend, PyTorch requests exactly its block sizes.
    assert device_bytes == torch.cuda.memory_allocated(), (device_bytes, torch.cuda.memory_allocated())
else:
    assert device_bytes == reserved, (device_bytes, reserved)
    assert count["cudaMalloc"] == count["cuMemAlloc_v2"] > count["cudaFree"] == count["cuMemFree_v2"] > 0
