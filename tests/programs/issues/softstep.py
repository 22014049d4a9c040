"""A function of autograd that stores its result on ctx: a cycle through C++ until the garbage collector runs."""
# issue: leak
import gc

import torch
import torch.nn as nn


class SoftStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.sigmoid()  # issue here
        ctx.result = result
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.result * (1 - ctx.result)


gc.disable()
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(16):
    loss = SoftStep.apply(model(torch.randn(512, 1024, device="cuda"))).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
