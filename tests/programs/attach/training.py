"""Trains with live tensors of several kinds, and does what a line of stdin asks for.

    state   prints the allocator's state as JSON
    step    trains one step
    sleep N its main thread runs no Python for N seconds
    stop    ends with the checksum of all parameters

Between two lines it runs Python in a loop, so that memtrace can attach at any time.
"""

import json
import os
import select
import sys
import threading
import time

import torch

threads = int(sys.argv[1]) if len(sys.argv) > 1 else 0

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16)).cuda()
optimizer = torch.optim.Adam(model.parameters())
kept = [torch.empty(size, device="cuda") for size in (1000, 3000, 700_000, 5_000_000)]
pool = torch.cuda.MemPool() if hasattr(torch.cuda, "MemPool") and len(sys.argv) > 2 else None
if pool is not None:
    with torch.cuda.use_mem_pool(pool):
        kept.append(torch.empty(100_000, device="cuda"))
if len(sys.argv) > 2:
    graph = torch.cuda.CUDAGraph()
    source = torch.ones(40_000, device="cuda")
    with torch.cuda.graph(graph):
        captured = [source * 2, source + 1]


def step():
    loss = model(torch.ones(8, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(torch.empty(2000 + len(kept), device="cuda"))
    if len(kept) > 12:
        del kept[3]


is_running = True


def allocate(number):
    """Allocates and frees all the time."""
    held = []
    while is_running:
        held.append(torch.empty(1000 * (number + 1), device="cuda"))
        if len(held) > 20:
            del held[:10]
        time.sleep(0.0002)


def thread_names():
    for thread in os.listdir("/proc/self/task"):
        # A thread that has been joined may end only now.
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                yield file.read().strip()
        except (FileNotFoundError, ProcessLookupError):
            pass


def state():
    global is_running
    is_running = False
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    blocks = [
        (block["address"], block["size"], block["requested_size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "blocks": sorted(blocks),
        "threads": sorted(thread_names()),
        "files": sorted(os.listdir("/proc/self/fd")),
        "shared": sum("memtrace (deleted)" in line for line in open("/proc/self/maps")),
    }


for _ in range(3):
    step()
workers = [threading.Thread(target=allocate, args=(number,)) for number in range(threads)]
for worker in workers:
    worker.start()
print("ready", flush=True)
while True:
    if not select.select([sys.stdin], [], [], 0.001)[0]:
        continue
    line = sys.stdin.readline().strip()
    if line == "state":
        print(json.dumps(state()), flush=True)
    elif line == "step":
        step()
        print("stepped", flush=True)
    elif line.startswith("sleep "):
        print("sleeping", flush=True)
        time.sleep(int(line.removeprefix("sleep ")))
        print("awake", flush=True)
    else:
        is_running = False
        for worker in workers:
            worker.join()
        print(sum(parameter.double().sum().item() for parameter in model.parameters()), flush=True)
        break
