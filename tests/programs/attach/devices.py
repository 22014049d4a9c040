"""Trains over all devices without a pause until a line of stdin asks for the allocator's state, as JSON: by device the allocated bytes, the
reserved bytes and the number of blocks. Then it goes on; `stop` ends it."""

import json
import select
import sys

import torch

devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
layers = [torch.nn.Linear(64, 64, device=device) for device in devices]
optimizer = torch.optim.Adam([parameter for layer in layers for parameter in layer.parameters()])
kept = [torch.empty(1000, device=devices[number % len(devices)]) for number in range(100)]
is_running = True
print("ready", flush=True)
while True:
    if is_running:
        value = torch.ones(8, 64, device=devices[0])
        for layer, device in zip(layers, devices):
            value = layer(value.to(device))
        value.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del value
    if not select.select([sys.stdin], [], [], 0 if is_running else 0.001)[0]:
        continue
    if sys.stdin.readline().strip() == "stop":
        print("stopped", flush=True)
        break
    is_running = not is_running
    if is_running:
        print("running", flush=True)
        continue
    segments = torch.cuda.memory_snapshot()
    in_use = [
        sum(block["state"] == "active_allocated" for s in segments if s["device"] == device.index for block in s["blocks"])
        for device in devices
    ]
    figures = [(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) for device in devices]
    print(json.dumps([[*pair, count] for pair, count in zip(figures, in_use)]), flush=True)
