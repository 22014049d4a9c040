"""An MLP-Mixer trained with one optimizer after another: SGD (foreach), Adam (fused), Adagrad, NAdam (one tensor at a time), LBFGS."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, PATCHES, WIDTH, LAYERS, CLASSES, STEPS = 128, 196, 512, 8, 100, 2


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 256), nn.GELU(), nn.Linear(256, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(768, WIDTH), nn.Sequential(*(Mixer() for _ in range(LAYERS))), nn.Linear(WIDTH, CLASSES)

    def forward(self, patches):
        return self.head(self.layers(self.stem(patches)).mean(dim=1))


def main():
    torch.manual_seed(0)
    model = Classifier().cuda()
    optimizers = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True),
        "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, fused=True),
        "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3, foreach=False),
        "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=4),
    }
    for name, create in optimizers.items():
        optimizer = create(model.parameters())
        for step in range(STEPS):
            patches, labels = torch.randn(BATCH, PATCHES, 768, device="cuda"), torch.randint(CLASSES, (BATCH,), device="cuda")

            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(patches), labels)
                loss.backward()
                return loss

            print(f"{name}, step {step}: loss {optimizer.step(closure).item():.4f}")


if __name__ == "__main__":
    main()
