# issue: worker-context
# env: OMP_NUM_THREADS=1
"""A collate function that builds its batch on the GPU: the workers of the loader run it."""

import torch
from torch.utils.data import DataLoader


def pad(rows):
    batch = torch.zeros(len(rows), 256, device="cuda")  # issue here
    return (batch + len(rows)).cpu()


def main():
    data = [torch.ones(n % 7 + 1) for n in range(24)]
    layer = torch.nn.Linear(256, 1024).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    loader = DataLoader(data, batch_size=8, num_workers=1, collate_fn=pad, multiprocessing_context="forkserver")
    for batch in loader:
        layer(batch.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
