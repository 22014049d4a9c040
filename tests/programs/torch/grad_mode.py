"""Allocations of unique sizes under changing grad modes on several threads; prints (size, mode) as PyTorch has it."""

import json
import random
import threading

import torch

torch.empty(1000, device="cuda")
random.seed(7)
truth = []
lock = threading.Lock()


def allocate(number):
    size = 1_000_001 + 2 * number
    torch.empty(size, dtype=torch.uint8, device="cuda")
    with lock:
        truth.append((size, torch.is_grad_enabled()))


def walk(first):
    for step in range(100):
        mode = random.choice([torch.no_grad, torch.enable_grad, torch.inference_mode])
        with mode():
            allocate(first + 3 * step)
            with torch.set_grad_enabled(random.random() < 0.5):
                allocate(first + 3 * step + 1)
        allocate(first + 3 * step + 2)


walk(0)
threads = [threading.Thread(target=walk, args=(1000 * (1 + n),)) for n in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(truth))
