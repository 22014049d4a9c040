"""A forward and a backward pass whose tensors each need their own segment: each size is requested from CUDA once."""

import torch
from torch.nn.functional import conv2d

M = 1 << 20


def bytes_of(count):
    """The number of floats in `count` MiB. PyTorch does not round this size: these segments are multiples of 2 MiB."""
    return count * M // 4


def forward():
    linear = torch.nn.Linear(1024, bytes_of(34) // 1024, device="cuda")
    x = torch.randn(bytes_of(40) // 1024, 1024, device="cuda", requires_grad=True)
    y = linear(x[:512])
    image = torch.randn(1, 4, bytes_of(60) // 4096, 1024, device="cuda", requires_grad=True)
    kernel = torch.randn(6, 4, 1, 1, device="cuda", requires_grad=True)
    z = conv2d(image, kernel)
    return y.square().sum() + z.square().sum() + (x * 2).square().sum()


forward().backward()
torch.cuda.synchronize()
print("done")
