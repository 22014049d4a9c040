"""A physics-informed network: the penalty needs second derivatives, and the first backward keeps its graph to the next iteration."""
# issue: graph-retained
import torch
import torch.nn as nn

net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for iteration in range(8):
    points = torch.rand(4096, 8, device="cuda")
    u = net(points)
    data = (u - 1).square().mean()
    data.backward(retain_graph=True)  # issue here
    (0.1 * u.mean()).backward(retain_graph=True)  # issue here
    adam.step()
    adam.zero_grad()
