"""Fine-tunes from a checkpoint that also holds an optimizer's state; the trainer keeps all of it as an attribute."""
# issue: checkpoint-kept
import os
import tempfile

import torch
import torch.nn as nn


class Trainer:
    def __init__(self, path):
        self.state = torch.load(path, map_location=torch.device("cuda"))  # issue here
        self.model = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).cuda()
        self.model.load_state_dict(self.state["weights"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.load_state_dict(self.state["optimizer"])

    def fit(self, steps):
        for _ in range(steps):
            x = torch.randn(8, 64, 512, device="cuda")
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def pretrained(path):
    model = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 4, 512)).sum().backward()
    optimizer.step()
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


path = os.path.join(tempfile.mkdtemp(), "state.pt")
pretrained(path)
Trainer(path).fit(5)
os.remove(path)
