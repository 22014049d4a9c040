"""The second rank of a job restores what the first one saved, which was on cuda:0."""
# issue: wrong-device
# env: SIMCUDA_DEVICES=2
import os
import tempfile

import torch
import torch.nn as nn

path = os.path.join(tempfile.mkdtemp(), "first.pt")
torch.save({k: v.to("cuda:0") for k, v in nn.Linear(2048, 2048).state_dict().items()}, path)
torch.cuda.empty_cache()
torch.cuda.set_device(1)
model = nn.Linear(2048, 2048).cuda()
weights = torch.load(path)  # issue here
model.load_state_dict(weights)
del weights
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    model(torch.randn(512, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
os.remove(path)
