"""Ranges, with PyTorch's own recorder enabled from the first block on; writes its ranges to MEMTRACE_TEST_TRUTH."""

import json
import os

import torch
from torch.profiler import record_function

# The process is recorded from its first block on.
torch.empty(64, device="cuda")
torch.cuda.memory._record_memory_history(global_record_annotations=True)
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 64)), batch_size=4)
for step, (x,) in enumerate(loader):
    with record_function(f"step {step}"), record_function("Gr\u00f6\u00dfe"):
        loss = model(x.to("cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with open(os.environ["MEMTRACE_TEST_TRUTH"], "w") as file:
    json.dump(torch.cuda.memory._snapshot()["external_annotations"], file)
