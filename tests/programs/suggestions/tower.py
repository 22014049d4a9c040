"""Trains a deep tower of equal layers with AdamW's default step, whose temporaries are as large as all weights."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("checkpoint-layers", "adapters", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


net = nn.Sequential(nn.Linear(128, 768), *(Residual(768) for _ in range(24)), nn.Linear(768, 10)).cuda().to(CHANGES.dtype)
CHANGES.adapt(net)
CHANGES.checkpoint("[1-9]*", net)
optimizer = CHANGES.optimizer(torch.optim.AdamW, net, lr=1e-3, amsgrad=True)
rows, accumulate = CHANGES.batches(1024)
for step in range(3):
    for _ in range(accumulate):
        x, y = torch.randn(rows, 128, device="cuda", dtype=CHANGES.dtype), torch.randint(10, (rows,), device="cuda")
        with CHANGES.around_forward():
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
