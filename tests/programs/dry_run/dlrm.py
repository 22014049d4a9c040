"""A recommendation model (DLRM): embedding bags with sparse gradients, pairwise interactions, two optimizers."""

import torch
import torch.nn as nn

ROWS = [1_000_000, 500_000, 400_000, 200_000, 100_000, 50_000, 10_000, 1_000]
BATCH, WIDTH, DENSE, HOT, STEPS = 8192, 128, 13, 4, 4


def mlp(*widths):
    layers = [layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True, device="cuda") for rows in ROWS)
        self.bottom = mlp(DENSE, 512, 256, WIDTH)
        count = len(ROWS) + 1
        self.top = mlp(WIDTH + count * (count - 1) // 2, 1024, 1024, 512, 1)
        self.register_buffer("pairs", torch.tril_indices(count, count, offset=-1))

    def forward(self, dense, indices, offsets):
        dense = self.bottom(dense)
        features = torch.stack([dense, *(table(i, offsets) for table, i in zip(self.tables, indices))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def main():
    torch.manual_seed(0)
    model = DLRM().to("cuda")
    sparse = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-3)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3)
    for step in range(STEPS):
        numbers = torch.randn(BATCH, DENSE).to("cuda")
        indices = [torch.randint(rows, (BATCH * HOT,)).to("cuda") for rows in ROWS]
        offsets = torch.arange(0, BATCH * HOT, HOT).to("cuda")
        clicks = torch.randint(2, (BATCH,)).float().to("cuda")
        loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, indices, offsets), clicks)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
