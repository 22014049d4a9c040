"""A list keeps a clone of the weights after each 3rd step; the last clone is made just before the end. TRUTH: all clones are kept tensors."""
import torch, copy
from torch import nn
m = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda(); opt = torch.optim.Adam(m.parameters()); kept = []
for i in range(15):
    m(torch.randn(256, 1024, device="cuda")).pow(2).mean().backward(); opt.step(); opt.zero_grad()
    if i % 3 == 2:
        with torch.no_grad(): m(torch.randn(256, 1024, device="cuda"))
        kept.append(copy.deepcopy(m.state_dict()))
