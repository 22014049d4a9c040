"""Gathers shards on a side stream, as a sharded trainer does, and lets record_stream delay their frees."""
# issue: deferred-frees
# env: SIMCUDA_KERNEL_US=3000
import torch


class Shards:
    def __init__(self, count):
        self.side = torch.cuda.Stream()
        self.parts = [torch.randn(1 << 19, device="cuda") for _ in range(count)]

    def full(self, index):
        whole = torch.cat([self.parts[index], self.parts[index - 1]])  # issue here
        with torch.cuda.stream(self.side):
            for _ in range(3):
                whole.mul(2)
        whole.record_stream(self.side)
        return whole


shards = Shards(12)
for layer in range(36):
    shards.full(layer % 12)
