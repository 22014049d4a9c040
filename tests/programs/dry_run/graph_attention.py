"""A graph attention network: gather, softmax over incoming edges by scatter, and sum by index_add."""

import torch
import torch.nn as nn
import torch.nn.functional as F

NODES, EDGES, FEATURES, WIDTH, HEADS, CLASSES, EPOCHS = 60_000, 600_000, 256, 64, 4, 40, 4


class GraphAttention(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.project = nn.Linear(inputs, HEADS * outputs, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(HEADS, outputs) * 0.1) for _ in range(2))

    def forward(self, x, edges):
        source, target = edges
        h = self.project(x).view(x.size(0), HEADS, -1)
        scores = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(scores)
        highest = scores.new_full((x.size(0), HEADS), -1e9).scatter_reduce(0, index, scores, "amax")
        weights = (scores - highest.detach()[target]).exp()
        total = torch.zeros_like(highest).scatter_add(0, index, weights)
        weights = F.dropout(weights / (total[target] + 1e-9), 0.3, self.training)
        return torch.zeros_like(h).index_add(0, target, h[source] * weights[:, :, None]).flatten(1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([GraphAttention(FEATURES, WIDTH), GraphAttention(HEADS * WIDTH, WIDTH), GraphAttention(HEADS * WIDTH, WIDTH)])
        self.head = nn.Linear(HEADS * WIDTH, CLASSES)

    def forward(self, x, edges):
        for layer in self.layers:
            x = F.elu(layer(x, edges))
        return self.head(x)


def main():
    torch.manual_seed(0)
    features = torch.randn(NODES, FEATURES).cuda()
    edges = torch.randint(NODES, (2, EDGES)).cuda()
    labels = torch.randint(CLASSES, (NODES,)).cuda()
    model = Network().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for epoch in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features, edges)[:NODES // 2], labels[:NODES // 2])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = (model(features, edges)[NODES // 2:].argmax(dim=1) == labels[NODES // 2:]).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct.item():.4f}")


if __name__ == "__main__":
    main()
