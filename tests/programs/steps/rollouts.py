"""Reinforcement learning: each iteration collects a rollout, trains on it, and copies the weights to the policy that acts.

Prints, for each range, the most that PyTorch had allocated inside.
"""

import copy

import torch
from torch.profiler import record_function

learner = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 16)).cuda()
actor = copy.deepcopy(learner).requires_grad_(False)
optimizer = torch.optim.SGD(learner.parameters(), lr=0.01)
peaks = {}


def measured(name, function, *arguments):
    torch.cuda.reset_peak_memory_stats()
    with record_function(name):
        result = function(*arguments)
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
    return result


@torch.no_grad()
def rollout():
    state, states, actions = torch.zeros(512, 256, device="cuda"), [], []
    for _ in range(8):
        logits = actor(state)
        states.append(state)
        actions.append(logits.argmax(dim=1))
        state = torch.tanh(state + logits.sum())
    return torch.cat(states), torch.cat(actions)


def train(states, actions):
    loss = torch.nn.functional.cross_entropy(learner(states), actions)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def sync():
    actor.load_state_dict(copy.deepcopy(learner.state_dict()))


for iteration in range(6):
    batch = measured("rollout", rollout)
    measured("train", train, *batch)
    del batch
    measured("sync", sync)
for name, peak in peaks.items():
    print(name, peak)
