"""Training with DataLoader workers of every start method, a pinning thread, and workers that persist for a second
epoch. Also tensors through a queue, and finally a worker that is killed while it works.

loaders.py METHOD...     METHOD: fork, spawn, forkserver
"""

import os
import signal
import sys

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch"))
import oracle


class Rows(Dataset):
    """CPU tensors only; the worker that gets row `deadly` dies of SIGKILL."""

    def __init__(self, deadly=None):
        self.deadly = deadly

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((256,), float(index)), index % 8


def echo(inbox, outbox):
    while (x := inbox.get()) is not None:
        outbox.put(x * 2)


def step(model, optimizer, x, y):
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, data, method, workers):
    loader = DataLoader(
        data, 16, num_workers=workers, pin_memory=True, persistent_workers=True, multiprocessing_context=method
    )
    for epoch in range(2):
        seen, pinned = [], True
        for x, y in loader:
            step(model, optimizer, x, y)
            seen += x[:, 0].int().tolist()
            pinned &= x.is_pinned()
        print(method, epoch, sorted(seen) == list(range(96)), "pinned", pinned)


def main(methods):
    oracle.start()
    model = torch.nn.Linear(256, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in methods:
        # A process that is not forked imports PyTorch first, so one is enough.
        train(model, optimizer, Rows(), method, 2 if method == "fork" else 1)
    context = mp.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(inbox, outbox))
    process.start()
    for k in range(3):
        inbox.put(torch.full((1 << 16,), float(k)))
        step(model, optimizer, outbox.get().view(-1, 256), torch.zeros(256, dtype=torch.long))
    inbox.put(None)
    process.join()
    print("queue", process.exitcode)
    try:
        train(model, optimizer, Rows(deadly=50), "fork", 2)
    except RuntimeError as e:
        print("a worker died:", "DataLoader worker (pid" in str(e))
    step(model, optimizer, torch.zeros(16, 256), torch.zeros(16, dtype=torch.long))
    torch.cuda.synchronize()
    oracle.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
