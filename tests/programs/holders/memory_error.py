"""A validation that keeps every prediction in a local variable until the GPU has no memory left."""
import torch

model = torch.nn.Linear(1024, 1024).cuda()


def validate(batches):
    preds = []
    with torch.no_grad():
        for _ in range(batches):
            preds.append(model(torch.ones(4096, 1024, device="cuda")))
    return torch.cat(preds)


def main():
    baseline = torch.ones(1024, 1024, device="cuda")
    return validate(100) + baseline.sum()


main()
