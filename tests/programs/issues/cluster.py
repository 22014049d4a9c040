"""A training class for many GPUs, here on one, with small buckets and a frozen backbone."""
# issue: ddp-buckets
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(512, 1024).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        x = self.backbone(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Job:
    def __init__(self):
        store = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group("nccl", init_method="file://" + store, rank=0, world_size=1)
        self.model = self.wrap(Module().cuda())
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def wrap(self, module):
        return nn.parallel.DistributedDataParallel(module, device_ids=[0], bucket_cap_mb=5, init_sync=False)  # issue here

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(128, 512, device="cuda")).mean()
        loss.backward()
        self.optimizer.step()


job = Job()
for _ in range(5):
    job.step()
dist.destroy_process_group()
