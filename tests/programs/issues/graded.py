# issue: none
"""Trains for some steps, and then computes the outputs of a whole test set, which it joins at the end of the program."""

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2048)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    inputs, labels = torch.randn(64, 256, device="cuda"), torch.randint(0, 2048, (64,), device="cuda")
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
outputs = []
with torch.inference_mode():
    for _ in range(100):
        outputs.append(model(torch.randn(64, 256, device="cuda")))
outputs = torch.cat(outputs)
print(outputs.shape, outputs.argmax(dim=1).unique().numel())
