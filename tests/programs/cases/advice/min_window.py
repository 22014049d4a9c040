"""The last 20 detached outputs in a deque. TRUTH: at the end 80 MiB are kept tensors of the program, not activations."""
import torch, collections
from torch import nn
m = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda(); opt = torch.optim.Adam(m.parameters()); q = collections.deque(maxlen=20)
def train(x):
    y = m(x); (y - x).pow(2).mean().backward(); opt.step(); opt.zero_grad(); return y.detach()
for i in range(60): q.append(train(torch.randn(1024, 1024, device="cuda")))
