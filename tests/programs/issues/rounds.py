"""Each round trains the model with a new optimizer, and a history keeps all of them with their state."""
# issue: leak
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
history = []
for rate in (1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 1e-4, 5e-5):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    history.append((rate, optimizer))
    for _ in range(3):
        inputs = torch.randn(64, 512, device="cuda")
        labels = torch.randint(0, 10, (64,), device="cuda")
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # issue here
