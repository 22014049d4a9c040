"""Linear regression with three layers, as a beginner writes it."""
# issue: gradients-not-cleared
import torch
import torch.nn as nn

net = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(4096, 512, device="cuda")
y = torch.randn(4096, 1, device="cuda")
for epoch in range(8):
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()  # issue here
    optimizer.step()
print(loss.shape)
