"""Graph attention (GATv2) of PyTorch Geometric on one full graph: 100,000 nodes, 2 million edges, attention dropout."""

import torch
from torch_geometric.nn import GATv2Conv

NODES, EDGES, FEATURES, WIDTH, HEADS, CLASSES, STEPS = 100_000, 2_000_000, 602, 64, 4, 41, 3


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GATv2Conv(FEATURES, WIDTH, heads=HEADS, dropout=0.3)
        self.second = GATv2Conv(WIDTH * HEADS, CLASSES, heads=1, dropout=0.3)

    def forward(self, x, edges):
        x = torch.nn.functional.dropout(self.first(x, edges).relu(), 0.5, training=self.training)
        return self.second(x, edges)


def main():
    torch.manual_seed(0)
    model = Network().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    x, edges = torch.randn(NODES, FEATURES).to("cuda"), torch.randint(NODES, (2, EDGES)).to("cuda")
    labels, is_training = torch.randint(CLASSES, (NODES, )).to("cuda"), torch.rand(NODES).to("cuda") < 0.6
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(x, edges)[is_training], labels[is_training])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
