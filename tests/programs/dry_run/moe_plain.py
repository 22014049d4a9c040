"""A mixture of experts in plain PyTorch: each expert gets the tokens that the router chose for it, whatever their number."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, LENGTH, WIDTH, EXPERTS, LAYERS, VOCABULARY, STEPS = 8, 512, 512, 8, 6, 16000, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(2, dim=-1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            if rows.numel() > 0:
                output.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return output.view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        self.norm1, self.norm2, self.experts = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Experts()

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.experts(self.norm2(x))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to("cuda")
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
