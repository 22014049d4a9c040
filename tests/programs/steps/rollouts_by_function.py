"""Reinforcement learning in three functions, without named ranges.

Prints, for each function, the most that PyTorch had allocated in its calls.
"""

import torch

learner = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
actor = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)


def rollout():
    observation, batch = torch.randn(1024, 128, device="cuda"), []
    with torch.no_grad():
        for _ in range(6):
            action = actor(observation).argmax(dim=1)
            batch.append((observation, action))
            observation = observation + torch.randn_like(observation)
    return batch


def train(batch):
    for observation, action in batch:
        loss = torch.nn.functional.cross_entropy(learner(observation), action)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sync():
    actor.load_state_dict({name: weight.clone() for name, weight in learner.state_dict().items()})


def main():
    peaks = {}

    def peak(name):
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        batch = rollout()
        peak("rollout")
        train(batch)
        peak("train")
        sync()
        peak("sync")
    for name, most in peaks.items():
        print(name, most)


main()
