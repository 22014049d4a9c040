"""Two tasks over one trunk. Both backward passes retain the graph, and the trainer keeps the last losses."""
# issue: graph-retained
import torch
import torch.nn as nn


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(768, 768), nn.GELU())])
        self.depth = nn.Linear(768, 64)
        self.normal = nn.Linear(768, 192)

    def forward(self, x):
        x = self.layers(x)
        return self.depth(x), self.normal(x)


class Trainer:
    def __init__(self):
        self.model = Trunk().cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.last = None

    def training_step(self, x):
        self.optimizer.zero_grad()
        depth, normal = self.model(x)
        losses = {"depth": depth.abs().mean(), "normal": normal.abs().mean()}
        for loss in losses.values():
            loss.backward(retain_graph=True)  # issue here
        self.optimizer.step()
        self.last = losses


trainer = Trainer()
for _ in range(8):
    trainer.training_step(torch.randn(2048, 768, device="cuda"))
print({k: v.shape for k, v in trainer.last.items()})
