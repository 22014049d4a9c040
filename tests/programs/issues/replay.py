"""Q-learning with a replay buffer that drops its oldest batch once it holds eight."""
# issue: none
import collections
import random

import torch
import torch.nn as nn


class Agent:
    def __init__(self):
        self.q = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
        self.optimizer = torch.optim.RMSprop(self.q.parameters())
        self.memory = collections.deque(maxlen=8)

    def observe(self, state):
        with torch.no_grad():
            action = self.q(state).argmax(1)
        self.memory.append((state, action))

    def learn(self):
        state, action = random.choice(self.memory)
        loss = self.q(state).gather(1, action.zero_()[:, None]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


agent = Agent()
for _ in range(40):
    agent.observe(torch.randn(1024, 512, device="cuda"))
    agent.learn()
