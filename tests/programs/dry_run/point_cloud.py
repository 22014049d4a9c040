"""A point cloud network (DGCNN): graphs of nearest neighbors are recomputed for every layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, POINTS, NEIGHBORS, CLASSES, STEPS = 12, 1024, 20, 40, 4


def edges(x):
    nearest = torch.cdist(x, x).topk(NEIGHBORS, dim=-1, largest=False).indices
    batch = torch.arange(x.size(0), device=x.device)[:, None, None]
    neighbors = x[batch, nearest]
    center = x[:, :, None].expand_as(neighbors)
    return torch.cat([neighbors - center, center], dim=-1)


class EdgeConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.norm = nn.Linear(2 * inputs, outputs, bias=False), nn.BatchNorm1d(outputs)

    def forward(self, x):
        h = self.linear(edges(x))
        h = self.norm(h.flatten(0, 2)).view_as(h)
        return F.leaky_relu(h, 0.2).amax(dim=2)


class DGCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([EdgeConvolution(3, 64), EdgeConvolution(64, 64), EdgeConvolution(64, 128), EdgeConvolution(128, 256)])
        self.merge = nn.Linear(512, 1024)
        self.head = nn.Sequential(nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(512, CLASSES))

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        x = self.merge(torch.cat(outputs, dim=-1))
        return self.head(torch.cat([x.amax(dim=1), x.mean(dim=1)], dim=-1))


def main():
    torch.manual_seed(0)
    model = DGCNN().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        clouds = torch.randn(BATCH, POINTS, 3).cuda()
        labels = torch.randint(CLASSES, (BATCH,)).cuda()
        loss = F.cross_entropy(model(clouds), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
