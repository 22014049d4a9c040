"""One rank of DistributedDataParallel with its default buckets."""
# issue: ddp-buckets
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn

store = os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("nccl", init_method="file://" + store, rank=0, world_size=1)
net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
model = nn.parallel.DistributedDataParallel(net, device_ids=[0], init_sync=False)  # issue here
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
