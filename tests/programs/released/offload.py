"""A server that gives up its model between jobs, and keeps more than it means to.

- `sleep` moves the weights to the CPU and empties the cache. One small tensor stays in a segment of 20 MiB.
- The last job deletes the model. A list still has one weight of it.

Prints what PyTorch has allocated and reserved after each.
"""

import torch
from torch.profiler import record_function

MIB = 1 << 20


class Server:
    def __init__(self):
        self.model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
        self.mean = None

    @torch.no_grad()
    def answer(self, batch):
        scratch = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        self.mean = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        del scratch
        return self.model(batch).sum()

    def sleep(self):
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def wake(self):
        self.model.to("cuda")


def report(name):
    print(name, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), flush=True)


def main():
    server = Server()
    for _ in range(3):
        server.answer(torch.zeros(8, 1024, device="cuda"))
        with record_function("sleep"):
            server.sleep()
        report("sleep")
        server.wake()
    favorites = {"third": server.model[3].weight}
    with record_function("shutdown"):
        del server
        torch.cuda.empty_cache()
    report("shutdown")
    return favorites


kept = main()
