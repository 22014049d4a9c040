"""Scores candidates in rounds and keeps one in five; each kept one holds the segment that it shares with the others."""
# issue: fragmentation
import torch

best = []
for round in range(3):
    candidates = [torch.randn(1 << 20, device="cuda") for _ in range(30)]  # issue here
    best.extend(candidates[::5])
    del candidates
    matrix = torch.empty(10 + round, 1 << 20, device="cuda")
    matrix.mul_(2)
    del matrix
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
