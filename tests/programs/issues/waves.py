# issue: none
"""A simulation of plain functions: it keeps its first 30 states, and every tenth request evaluates and frees the results."""

import torch

SIZE = 512
first = []


def advance(state):
    laplacian = torch.roll(state, 1, 0) + torch.roll(state, -1, 0) - 2 * state
    return state + 0.1 * laplacian


def evaluate(state):
    results = [(state * scale).abs() for scale in range(1, 21)]
    return torch.stack([result.mean() for result in results]).max()


state = torch.zeros(SIZE, SIZE, device="cuda")
best = []
for number in range(150):
    state = advance(state)
    if number < 30:
        first.append(state)
    if number % 10 == 9:
        best.append(evaluate(state))
