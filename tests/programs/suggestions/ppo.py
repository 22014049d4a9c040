"""Trains a policy and a value network on frames with clipped policy updates, three epochs of minibatches a rollout."""
import changes
import torch
from torch import nn
from torch.nn import functional as F

SUPPORTED = ("smaller-batches", "checkpoint-layers", "smaller-evaluation-batch", "bfloat16-model", *changes.FORWARD)
CHANGES = changes.parse(*SUPPORTED, "single-tensor-step", "fused-step", "eight-bit-moments")
ENVIRONMENTS, STEPS, ACTIONS, MINIBATCH, EPOCHS = 16, 32, 15, 128, 3


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.enter, self.first, self.second = [nn.Conv2d(n, outputs, 3, padding=1) for n in (inputs, outputs, outputs)]

    def forward(self, x):
        x = F.max_pool2d(self.enter(x), 3, stride=2, padding=1)
        return x + self.second(F.relu(self.first(F.relu(x))))


class Network(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.stages = nn.Sequential(Stage(4, 32), Stage(32, 64), Stage(64, 64))
        self.hidden, self.out = nn.Linear(64 * 11 * 11, 512), nn.Linear(512, outputs)

    def forward(self, frames):
        return self.out(F.relu(self.hidden(self.stages(frames).flatten(1).relu())))


def log_probabilities(agent, frames, actions):
    every = F.log_softmax(agent["policy"](frames), dim=-1)
    return every.gather(1, actions[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


@torch.no_grad()
def collect(agent):
    frames = torch.rand(STEPS * ENVIRONMENTS, 4, 84, 84, device="cuda", dtype=CHANGES.dtype)
    actions = torch.zeros(STEPS * ENVIRONMENTS, dtype=torch.long, device="cuda")
    pairs = [*zip(*(t.chunk(4 if "smaller-evaluation-batch" in CHANGES else 1) for t in (frames, actions)))]
    old = torch.cat([log_probabilities(agent, some, taken)[0] for some, taken in pairs])
    values = torch.cat([agent["value"](some).squeeze(1) for some, _ in pairs])
    returns = [torch.rand(ENVIRONMENTS, device="cuda")]
    for _ in range(STEPS - 1):
        returns.insert(0, torch.rand(ENVIRONMENTS, device="cuda") + 0.99 * returns[0])
    returns = torch.cat(returns).to(CHANGES.dtype)
    advantages = returns - values
    return frames, actions, old, returns, (advantages - advantages.mean()) / (advantages.std() + 1e-8)


agent = nn.ModuleDict({"policy": Network(ACTIONS), "value": Network(1)}).to("cuda", CHANGES.dtype)
CHANGES.checkpoint("*.stages.*", agent)
optimizer = CHANGES.optimizer(torch.optim.Adam, agent, lr=2.5e-4, eps=1e-5)
size, accumulate = CHANGES.batches(MINIBATCH)
for update in range(2):
    rollout = collect(agent)
    for epoch in range(EPOCHS):
        for number, (frames, actions, old, returns, advantages) in enumerate(zip(*(t.split(size) for t in rollout)), 1):
            with CHANGES.around_forward():
                new, entropy = log_probabilities(agent, frames, actions)
                ratio = torch.exp(new - old)
                gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
                loss = 0.5 * F.mse_loss(agent["value"](frames).squeeze(1), returns) - gain - 0.01 * entropy.mean()
            (loss / accumulate).backward()
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
changes.done()
