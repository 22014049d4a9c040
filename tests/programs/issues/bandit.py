"""A policy over a bandit: the log probabilities of all episodes stay in the agent's list, with their graphs."""
# issue: graph-kept
import torch
import torch.nn as nn


class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)).cuda()
        self.optimizer = torch.optim.Adam(self.policy.parameters())
        self.log_probs = []

    def act(self, state):
        logits = self.policy(state)
        self.log_probs.append(logits.log_softmax(1)[:, 0])  # issue here
        return logits.detach().argmax(1)

    def learn(self, state):
        loss = -self.policy(state).log_softmax(1)[:, 0].mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


agent = Agent()
for episode in range(14):
    state = torch.randn(512, 512, device="cuda")
    agent.act(state)
    agent.learn(state)
