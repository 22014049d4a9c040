"""A teacher that is neither frozen nor under no_grad: its graph is kept, and its gradients are never used."""
# issue: gradients-not-cleared
import torch
import torch.nn as nn
import torch.nn.functional as F


def tower(width):
    return nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 100))


teacher, student = tower(2048).cuda().eval(), tower(256).cuda()
optimizer = torch.optim.Adam(student.parameters())
for step in range(8):
    x = torch.randn(4096, 512, device="cuda")
    targets = teacher(x)  # issue here
    loss = F.kl_div(F.log_softmax(student(x), -1), F.softmax(targets, -1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
