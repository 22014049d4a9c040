"""A DataLoader with workers and pinned memory."""
# issue: none
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    data = TensorDataset(torch.randn(512, 3, 32, 32), torch.zeros(512, dtype=torch.long))
    loader = DataLoader(data, batch_size=64, num_workers=2, pin_memory=True)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 30 * 30, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
