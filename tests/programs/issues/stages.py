"""Trains in two stages; the second one, with longer inputs and another loop, does not fit."""
# issue: none
# env: SIMCUDA_MEMORY=420M
# exit: 1
import torch
import torch.nn as nn

net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))], nn.Linear(512, 10)).cuda()
optimizer = torch.optim.Adam(net.parameters())


def warm_up(steps):
    for _ in range(steps):
        net(torch.randn(1024, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def refine(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        near, far = (net(torch.randn(8192, 512, device="cuda")) for _ in range(2))
        (near - far).square().mean().backward()
        optimizer.step()


warm_up(4)
refine(4)
