"""Inference with torch.compile(mode="reduce-overhead"): CUDA graphs for two batch sizes."""

import torch
import torch.nn as nn

WIDTH, LAYERS, LENGTH = 1024, 4, 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 32000)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens))).softmax(dim=-1)


def main():
    torch.manual_seed(0)
    model = Model().cuda().bfloat16()
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    results = []
    with torch.no_grad():
        for batch in [16, 32]:
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                tokens = torch.randint(32000, (batch, LENGTH), device="cuda")
                results.append(compiled(tokens).max(dim=-1).values.cpu())
    print("answered", len(results), "batches")


if __name__ == "__main__":
    main()
