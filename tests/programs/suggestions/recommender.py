"""Trains a recommender on clicks, an MLP over two embedding tables, and zeroes gradients after the forward pass."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("smaller-batches", "bfloat16-model", "set-to-none", *changes.SGD, *changes.FORWARD)
USERS, ITEMS, FACTORS, HISTORY = 600_000, 250_000, 96, 20


class Recommender(nn.Module):
    def __init__(self, hidden=(1024, 512, 256)):
        super().__init__()
        self.user_table = nn.Embedding(USERS, FACTORS)
        self.item_table = nn.Embedding(ITEMS, FACTORS)
        sizes = (3 * FACTORS, *hidden)
        steps = []
        for before, after in zip(sizes, sizes[1:]):
            steps += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.2)]
        self.tower = nn.Sequential(*steps)
        self.click = nn.Linear(sizes[-1], 1)

    def forward(self, user, item, history):
        seen = self.item_table(history).mean(dim=1)
        features = torch.cat((self.user_table(user), self.item_table(item), seen), dim=-1)
        return self.click(self.tower(features)).squeeze(-1)


def clicks(count):
    user = torch.zeros(count, dtype=torch.long, device="cuda")
    item = torch.zeros(count, dtype=torch.long, device="cuda")
    history = torch.zeros(count, HISTORY, dtype=torch.long, device="cuda")
    return user, item, history, torch.zeros(count, device="cuda", dtype=CHANGES.dtype)


def train(steps=5, size=16384):
    model = Recommender().to("cuda", CHANGES.dtype)
    optimizer = CHANGES.optimizer(torch.optim.SGD, model, lr=0.05, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    batch, accumulate = CHANGES.batches(size)
    for _ in range(steps):
        for turn in range(accumulate):
            user, item, history, clicked = clicks(batch)
            with CHANGES.around_forward():
                loss = criterion(model(user, item, history), clicked) / accumulate
            if turn == 0 and "set-to-none" not in CHANGES:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if "set-to-none" in CHANGES:
            optimizer.zero_grad(set_to_none=True)


train()
changes.done()
