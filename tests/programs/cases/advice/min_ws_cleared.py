"""Training, then the workspaces of cuBLAS are cleared as Lightning's teardown does (torch._C._cuda_clearCublasWorkspaces). TRUTH: 33 MiB (forward) and 32 MiB (backward) are cuBLAS workspaces."""
import torch
from torch import nn
m = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda(); opt = torch.optim.Adam(m.parameters())
with torch.no_grad(): m(torch.randn(64, 1024, device="cuda"))
for i in range(6):
    x = torch.randn(64, 1024, device="cuda")
    m(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
m.cpu(); torch._C._cuda_clearCublasWorkspaces(); torch.cuda.empty_cache()
