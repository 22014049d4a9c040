"""Two models with an optimizer each, which are all stepped; each round replaces one of the optimizers."""
# issue: none
import torch
import torch.nn as nn


def tower():
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()


first, second = tower(), tower()
steady = torch.optim.Adam(first.parameters())
for rate in (1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 1e-4, 5e-5):
    fresh = torch.optim.Adam(second.parameters(), lr=rate)
    for _ in range(3):
        inputs = torch.randn(64, 512, device="cuda")
        labels = torch.randint(0, 10, (64,), device="cuda")
        for model, optimizer in ((first, steady), (second, fresh)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
