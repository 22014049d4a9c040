"""Trains a wide recommender with small batches: weights, gradients and Adam's moments are nearly all of the memory."""
# limits: 700M 1100M
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("bfloat16-model", "adapters", "smaller-batches", "checkpoint-layers", *changes.ADAM, *changes.FORWARD)


class Recommender(nn.Module):
    def __init__(self, users=60000, items=40000, width=256):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.tower = nn.Sequential(nn.Linear(2 * width, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
                                   nn.Linear(4096, 1))

    def forward(self, user, item):
        return self.tower(torch.cat([self.users(user), self.items(item)], dim=1)).squeeze(1)


def main():
    with torch.device("cuda"):
        model = Recommender().to(CHANGES.dtype)
    CHANGES.adapt(model)
    CHANGES.checkpoint("tower.?", model)
    optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3)
    loss_function = nn.BCEWithLogitsLoss()
    batch, accumulate = CHANGES.batches(512)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(accumulate):
            user, item = torch.randint(60000, (batch,)).cuda(), torch.randint(40000, (batch,)).cuda()
            clicked = torch.ones(batch, dtype=CHANGES.dtype).cuda()
            with CHANGES.around_forward():
                loss = loss_function(model(user, item), clicked)
            loss.backward()
        optimizer.step()
    changes.done()


main()
