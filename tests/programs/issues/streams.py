"""Copies batches on six streams of its own, which it uses again for every batch."""
# issue: none
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
streams = [torch.cuda.Stream() for _ in range(6)]
for step in range(12):
    stream = streams[step % len(streams)]
    with torch.cuda.stream(stream):
        batch = torch.randn(256, 1024).to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
