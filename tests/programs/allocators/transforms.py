"""Ways to compute gradients: torch.func (grad, vmap, jvp, functional_call), checkpointing of both kinds, save_on_cpu,
and threads that run forward and backward in parallel."""

import threading

import torch
import torch.nn as nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
import oracle

oracle.start()
net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).cuda()
parameters = {name: p.detach() for name, p in net.named_parameters()}
x = torch.randn(32, 64, device="cuda")


def loss(parameters, x):
    return functional_call(net, parameters, (x,)).square().sum()


per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
value, tangent = jvp(lambda x: loss(parameters, x), (x,), (torch.ones_like(x),))
jacobian = jacrev(lambda x: net(x))(x[:4])
del per_sample, tangent

for reentrant in (True, False):
    y = x.clone().requires_grad_()
    for _ in range(3):
        y = checkpoint(lambda y: torch.tanh(y) * 2, y, use_reentrant=reentrant)
    checkpoint_sequential(net, 2, y, use_reentrant=reentrant).sum().backward()
    net.zero_grad()

for pin in (False, True):
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        net(x.clone().requires_grad_()).square().sum().backward()


def work(index):
    own = nn.Linear(64 + index, 32).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            own(torch.randn(16, 64 + index, device="cuda")).sum().backward()
            own.zero_grad()
        stream.synchronize()


threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
