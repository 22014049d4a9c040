"""A trainer packs its weights for a sampler after each step, on streams that it makes anew each time."""
# issue: stream-caches
import torch
import torch.nn as nn


def pack(model):
    for part in model:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            packed = torch.empty(24 << 20, dtype=torch.uint8, device="cuda")  # issue here
            packed[: part.weight.nbytes].copy_(part.weight.detach().view(-1).view(torch.uint8))
        stream.synchronize()


model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    pack(model)
