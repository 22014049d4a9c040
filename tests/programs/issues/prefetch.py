"""A copy stream feeds batches; record_stream ties each to the compute stream, which lags behind."""
# issue: deferred-frees
# env: SIMCUDA_KERNEL_US=20000
import torch
import torch.nn as nn

copy, compute = torch.cuda.Stream(), torch.cuda.Stream()
net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
with torch.no_grad():
    for step in range(30):
        with torch.cuda.stream(copy):
            batch = torch.empty(4096, 1024, device="cuda")  # issue here
        compute.wait_stream(copy)
        with torch.cuda.stream(compute):
            for _ in range(4):
                result = net(batch)
            batch.record_stream(compute)
        del batch
