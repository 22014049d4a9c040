"""Runs batches through a function that keeps a failed attempt's exception in a local: a frame-traceback cycle."""
# issue: reference-cycle
import gc

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def attempt(x, shift):
    noise = torch.randn(1024, 2048, device="cuda")  # issue here
    failure = None
    try:
        if shift % 2 == 0:
            raise ValueError("unlucky")
    except ValueError as error:
        failure = error
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return failure is None, noise.shape


for i in range(20):
    attempt(torch.randn(256, 512, device="cuda"), i)
    if i % 5 == 4:
        gc.collect()
