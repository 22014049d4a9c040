"""Training with ranges of both kinds. It keeps each prediction, and a step with a longer batch needs more memory than the device has."""
import torch
import torch.nn as nn
from torch.profiler import record_function

history = []


def step(model, optimizer, number, length):
    with record_function(f"step {number}"):
        torch.cuda.nvtx.range_push("batch")
        x = torch.ones(16, length, 256, device="cuda")
        torch.cuda.nvtx.range_pop()
        optimizer.zero_grad()
        with record_function("forward pass"):
            y = model(x)
        history.append(y.detach().clone())
        with record_function("backward pass"):
            y.square().mean().backward()
        optimizer.step()


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(6):
        step(model, optimizer, number, 4096 if number == 5 else 128)


main()
