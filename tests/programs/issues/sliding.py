"""Generates with a window: one tensor per token, and the oldest is dropped."""
# issue: none
import torch
import torch.nn as nn


class Window:
    def __init__(self, size):
        self.size, self.states = size, []

    def push(self, state):
        self.states.append(state)
        if len(self.states) > self.size:
            self.states.pop(0)
        return torch.cat(self.states, 1)


model = nn.Sequential(nn.Linear(1024, 2048), nn.SiLU(), nn.Linear(2048, 1024)).cuda().eval()
window = Window(10)
token = torch.randn(64, 1, 1024, device="cuda")
with torch.inference_mode():
    for _ in range(48):
        states = window.push(model(token))
        token = states.mean(1, keepdim=True)
