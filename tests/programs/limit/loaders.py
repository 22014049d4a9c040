"""Reads rows through DataLoader workers under a limit. Each worker is forked while a thread allocates, and lives while
this thread allocates too. Prints the number of rows of each epoch."""

import signal
import threading

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS, WORKERS, ROWS, ALLOCATIONS = 6, 4, 64, 10


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.full((16,), float(index))


def allocate():
    """Allocates a segment on the device, and frees it."""
    torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def main():
    # A hang ends with SIGALRM.
    signal.alarm(150)
    allocate()
    is_over = threading.Event()

    def always():
        while not is_over.is_set():
            allocate()

    thread = threading.Thread(target=always)
    thread.start()
    for epoch in range(EPOCHS):
        rows = iter(DataLoader(Rows(), 8, num_workers=WORKERS, multiprocessing_context="fork"))
        # The workers live.
        for _ in range(ALLOCATIONS):
            allocate()
        print(epoch, sum(len(batch) for batch in rows))
    is_over.set()
    thread.join()


if __name__ == "__main__":
    main()
