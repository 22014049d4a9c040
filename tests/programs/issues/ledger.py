"""The losses of all steps are kept with their graphs, and backward retains these: the third step finds no memory."""

# issue: graph-kept
# env: SIMCUDA_MEMORY=400M
# exit: 1

import torch
import torch.nn as nn

net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(12):
    optimizer.zero_grad()
    loss = net(torch.randn(2048, 1024, device="cuda")).square().mean()  # issue here
    loss.backward(retain_graph=True)  # issue here
    optimizer.step()
    losses.append(loss)
