"""A model that fits in memory with its gradients, but without its optimizer state."""
# issue: optimizer-state-does-not-fit
# env: SIMCUDA_MEMORY=400M
# exit: 1
import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(3):
    loss = model(torch.randn(16, 2048, device="cuda")).mean()
    loss.backward()
    optimizer.step()  # issue here
    optimizer.zero_grad()
