"""A forecast on a mesh as in GraphCast: encoder, 8 rounds of message passing, decoder, in bfloat16 autocast."""

import torch
import torch.nn as nn

GRID, MESH, GRID_EDGES, MESH_EDGES, FEATURES, WIDTH, ROUNDS, STEPS = 181 * 360, 10242, 200_000, 80_000, 178, 512, 8, 3


def mlp(inputs, outputs=WIDTH):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs), nn.LayerNorm(outputs))


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge, self.node = mlp(3 * WIDTH), mlp(2 * WIDTH)

    def forward(self, senders, receivers, edges, index):
        new = self.edge(torch.cat([edges, senders[index[0]], receivers[index[1]]], dim=-1))
        total = torch.zeros_like(receivers).index_add_(0, index[1], new.to(receivers.dtype))
        return receivers + self.node(torch.cat([receivers, total], dim=-1)), edges + new


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.grid, self.mesh, self.edges = mlp(FEATURES), mlp(3), nn.ModuleList(mlp(4) for _ in range(3))
        self.encode, self.decode, self.rounds = Messages(), Messages(), nn.ModuleList(Messages() for _ in range(ROUNDS))
        self.head = nn.Linear(WIDTH, FEATURES // 2)

    def forward(self, fields, places, edges, indices):
        grid, mesh = self.grid(fields), self.mesh(places)
        up, own, down = (layer(one) for layer, one in zip(self.edges, edges))
        mesh, _ = self.encode(grid, mesh, up, indices[0])
        for layer in self.rounds:
            mesh, own = layer(mesh, mesh, own, indices[1])
        grid, _ = self.decode(mesh, grid, down, indices[2])
        return self.head(grid)


def main():
    torch.manual_seed(0)
    model = Forecast().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = torch.randn(MESH, 3).to("cuda")
    counts = (GRID_EDGES, MESH_EDGES, 3 * GRID)
    edges = [torch.randn(count, 4).to("cuda") for count in counts]
    ends = ((GRID, MESH), (MESH, MESH), (MESH, GRID))
    indices = [torch.stack([torch.randint(one, (count, )) for one in both]).to("cuda") for both, count in zip(ends, counts)]
    for step in range(STEPS):
        fields, target = torch.randn(GRID, FEATURES).to("cuda"), torch.randn(GRID, FEATURES // 2).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(fields, places, edges, indices), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
