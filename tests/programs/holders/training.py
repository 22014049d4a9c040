"""A training in a function that appends the loss of each step, with its graph, to a list of the run."""
import torch
import torch.nn as nn


class Run:
    def __init__(self):
        self.losses = []


def main():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    run, outputs = Run(), []
    for step in range(24):
        batch = torch.randn(1024, 1024, device="cuda")
        out = model(batch)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(out.detach())
        run.losses.append(loss)
    return len(run.losses)


print(main())
