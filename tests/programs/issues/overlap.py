"""Runs each expert of a layer on its own stream, and makes new streams for each batch."""
# issue: cublas-workspaces
import os

import torch
import torch.nn as nn

os.environ["TORCH_CUBLAS_WORKSPACE_CACHE"] = "1"  # PyTorch 2.15 keeps no workspace otherwise.
experts = nn.ModuleList(nn.Linear(512, 512) for _ in range(4)).cuda()
with torch.no_grad():
    for batch in range(6):
        x = torch.randn(256, 512, device="cuda")
        outputs = []
        for expert in experts:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(expert(x))  # issue here
        torch.cuda.synchronize()
