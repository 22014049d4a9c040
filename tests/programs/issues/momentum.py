"""The first update of a wide embedding under SGD with momentum; the script prints the error and exits."""
# issue: optimizer-state-does-not-fit
# env: SIMCUDA_MEMORY=220M
# exit: 3
import sys

import torch
import torch.nn as nn


class Train:
    def __init__(self):
        self.table = nn.Embedding(40000, 512).cuda()
        self.optim = torch.optim.SGD(self.table.parameters(), lr=0.1, momentum=0.9)

    def one(self):
        ids = torch.zeros(64, dtype=torch.long, device="cuda")
        self.table(ids).sum().backward()
        self.optim.step()  # issue here


try:
    Train().one()
except torch.OutOfMemoryError as error:
    print(type(error).__name__)
    sys.exit(3)
