"""torchvision's ResNet-50 with SGD and momentum, three steps."""

import sys

import torch
import torchvision
import oracle

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 2
oracle.start()
model = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    images = torch.randn(batch, 3, 64, 64, device="cuda")
    labels = torch.zeros(batch, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
print("peak", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.memory_reserved())
oracle.finish()
