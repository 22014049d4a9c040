"""Two training steps of one rank with DistributedDataParallel."""

import argparse

import torch
import torch.distributed as dist
from mlp import make_batch, make_model
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--bucket-view", action="store_true", help="let gradients be parts of the buckets")
options = parser.parse_args()

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(make_model(), gradient_as_bucket_view=options.bucket_view)
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    loss = model(make_batch()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
