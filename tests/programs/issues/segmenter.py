"""A small segmentation network whose forward hook stores features under a key that is new in every iteration."""
# issue: leak
import torch
import torch.nn as nn


def probe(store):
    def hook(module, inputs, output):
        store[len(store)] = output.detach().float().mean(1).clone()  # issue here

    return hook


features = {}
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1)).cuda()
net[1].register_forward_hook(probe(features))
sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for batch in range(7):
        image = torch.randn(8, 3, 128, 128, device="cuda")
        mask = torch.zeros(8, 128, 128, dtype=torch.long, device="cuda")
        loss = nn.functional.cross_entropy(net(image), mask)
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
print(len(features))
