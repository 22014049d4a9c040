"""A small training that keeps the output of each step. train.py [--hidden N] [--oom]"""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--oom", action="store_true", help="request more than the device has after the steps")
options = parser.parse_args()

model = torch.nn.Sequential(torch.nn.Linear(256, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 256)).cuda()
optimizer = torch.optim.Adam(model.parameters())
history = []


def step():
    optimizer.zero_grad()
    output = model(torch.randn(512, 256, device="cuda"))
    history.append(output.detach().clone())  # The leak.
    output.sum().backward()
    optimizer.step()


for _ in range(8):
    step()
print("trained")
if options.oom:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")  # The request.
