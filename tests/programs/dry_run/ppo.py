"""Proximal policy optimization: a rollout of a policy over images, advantages, then epochs of minibatches."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

ENVIRONMENTS, HORIZON, ACTIONS, EPOCHS, MINIBATCHES, UPDATES = 64, 64, 6, 2, 4, 2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
                                     nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())
        self.actor, self.critic = nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, observations):
        hidden = self.network(observations / 255.0)
        return Categorical(logits=self.actor(hidden), validate_args=False), self.critic(hidden).squeeze(-1)


def main():
    torch.manual_seed(0)
    device = "cuda"
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    observations = torch.zeros(HORIZON, ENVIRONMENTS, 4, 84, 84, device=device)
    actions = torch.zeros(HORIZON, ENVIRONMENTS, dtype=torch.long, device=device)
    logs, rewards, values = (torch.zeros(HORIZON, ENVIRONMENTS, device=device) for _ in range(3))
    for update in range(UPDATES):
        with torch.no_grad():
            for t in range(HORIZON):
                observations[t] = torch.randint(256, (ENVIRONMENTS, 4, 84, 84), device=device)
                distribution, values[t] = agent(observations[t])
                actions[t] = distribution.sample()
                logs[t] = distribution.log_prob(actions[t])
                rewards[t] = torch.randn(ENVIRONMENTS, device=device)
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(HORIZON)):
                following = values[t + 1] if t + 1 < HORIZON else values[t]
                last = rewards[t] + 0.99 * following - values[t] + 0.99 * 0.95 * last
                advantages[t] = last
        returns = (advantages + values).flatten()
        flat = observations.flatten(0, 1), actions.flatten(), logs.flatten(), advantages.flatten(), returns
        for _ in range(EPOCHS):
            for chosen in torch.randperm(HORIZON * ENVIRONMENTS).to(device).chunk(MINIBATCHES):
                seen, done, old, advantage, target = (tensor[chosen] for tensor in flat)
                distribution, value = agent(seen)
                ratio = (distribution.log_prob(done) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                loss = policy + 0.5 * (value - target).pow(2).mean() - 0.01 * distribution.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(f"update {update}: loss {loss.item():.4f}, reward {rewards.mean().item():.4f}")


if __name__ == "__main__":
    main()
