"""A recurrent model over a long sequence in pieces. Each piece begins with the detached state of the piece before."""
# issue: none
import torch
import torch.nn as nn

cell, head = nn.GRUCell(256, 1024).cuda(), nn.Linear(1024, 256).cuda()
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
state = torch.zeros(2048, 1024, device="cuda")
for piece in range(6):
    loss = 0
    for _ in range(4):
        x = torch.zeros(2048, 256, device="cuda")
        state = cell(x, state)
        loss = loss + head(state).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = state.detach()
