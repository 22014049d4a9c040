"""Trains a Q-network from a replay buffer on the GPU, of which each step reads some rows."""
import changes
import torch
from torch import nn
from torch.nn import functional

CHANGES = changes.parse("data-to-cpu", *changes.ADAM)
ROWS, WIDTH = 15_000, 4096


class Buffer:
    """The last transitions of an environment."""

    def __init__(self, device):
        self.device = device
        self.states = torch.zeros(ROWS, WIDTH, device=device)
        self.later = torch.zeros(ROWS, WIDTH, device=device)
        self.actions = torch.zeros(ROWS, dtype=torch.long, device=device)
        self.rewards = torch.zeros(ROWS, device=device)

    def add(self, row, state):
        self.states[row] = self.later[row - 1] = state

    def sample(self, size):
        rows = torch.randint(ROWS, (size,), device=self.device)
        return tuple(data[rows].cuda() for data in (self.states, self.later, self.actions, self.rewards))


buffer = Buffer("cpu" if "data-to-cpu" in CHANGES else "cuda")
network = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
optimizer = CHANGES.optimizer(torch.optim.Adam, network)
for step in range(6):
    buffer.add(step, torch.randn(WIDTH, device="cuda"))
    states, later, actions, rewards = buffer.sample(512)
    with torch.no_grad():
        targets = rewards + 0.99 * network(later).max(1).values
    values = network(states).gather(1, actions[:, None])[:, 0]
    functional.mse_loss(values, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
