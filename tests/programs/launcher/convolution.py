"""A convolution of ResNet-18 with so many images, and its gradients. With `benchmark`, PyTorch tries several algorithms."""

import sys

import torch

torch.backends.cudnn.benchmark = "benchmark" in sys.argv
images = torch.zeros(int(sys.argv[1]), 64, 56, 56, device="cuda", requires_grad=True)
convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
convolution(images).sum().backward()
