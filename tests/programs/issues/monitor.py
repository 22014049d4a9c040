"""One helper computes a policy's scores, for the training and for a log; only the logging call lacks no_grad."""
# issue: eval-without-no-grad
import torch
import torch.nn as nn


def scores(states):
    return policy(states).square().mean(1)


layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
policy = nn.Sequential(*layers).cuda()
optimizer = torch.optim.Adam(policy.parameters())
for step in range(8):
    states = torch.randn(2048, 1024, device="cuda")
    before = scores(states)  # issue here
    loss = (scores(states) - before.detach()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
