"""Training with DataLoader workers that fork after CUDA is in use, with pinned memory."""

import torch
from torch.utils.data import DataLoader, TensorDataset
import oracle

if __name__ == "__main__":
    oracle.start()
    model = torch.nn.Linear(64, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(64, 64), torch.zeros(64, dtype=torch.long))
    seen = 0
    for x, y in DataLoader(data, batch_size=16, num_workers=2, pin_memory=True, multiprocessing_context="fork"):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(x)
    print("rows", seen)
    oracle.finish()
