# issue: stray-context
# env: SIMCUDA_DEVICES=2 OMP_NUM_THREADS=1
"""Two ranks that each warm the GPU up before they select their own: both do it on GPU 0."""

import os

import torch
import torch.multiprocessing as mp


def train(rank):
    torch.ones(64, 64).cuda().sum()  # issue here
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.zeros(256, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    processes = []
    for rank in range(2):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        processes.append(context.Process(target=train, args=(rank,)))
        processes[-1].start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
