"""A frozen teacher, and one under no_grad."""
# issue: none
import torch
import torch.nn as nn
import torch.nn.functional as F


def tower(width):
    return nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 100))


teacher, student = tower(2048).cuda().eval(), tower(256).cuda()
assistant = tower(1024).cuda().requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters())
for step in range(8):
    x = torch.randn(4096, 512, device="cuda")
    with torch.no_grad():
        targets = teacher(x)
    targets = targets + assistant(x)
    loss = F.kl_div(F.log_softmax(student(x), -1), F.softmax(targets, -1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
