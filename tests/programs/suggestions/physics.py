"""Fits a network to Burgers' equation by the residual of its own derivatives, and looks at it on a dense grid."""
import changes
import torch
from torch import nn

CHANGES = changes.parse(
    "smaller-batches", "checkpoint-layers", "no-grad", "smaller-evaluation-batch", "bfloat16-model",
    *changes.ADAM, *changes.FORWARD,
)
VISCOSITY = 0.01 / torch.pi


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Solution(nn.Module):
    def __init__(self, width=384, depth=5):
        super().__init__()
        self.enter, self.leave = Layer(2, width), nn.Linear(width, 1)
        self.layers = nn.Sequential(*[Layer(width, width) for _ in range(depth)])

    def forward(self, place, time):
        return self.leave(self.layers(self.enter(torch.cat([place, time], dim=1))))


def derivative(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def residual(solution, points):
    place, time = (torch.rand(points, 1, device="cuda", dtype=CHANGES.dtype, requires_grad=True) for _ in range(2))
    u = solution(place, time)
    u_place, u_time = derivative(u, place), derivative(u, time)
    return u_time + u * u_place - VISCOSITY * derivative(u_place, place)


def boundary(solution, points):
    place = torch.rand(points, 1, device="cuda", dtype=CHANGES.dtype)
    return solution(place, torch.zeros_like(place)) + torch.sin(torch.pi * place)


def on_grid(solution, side=400):
    axis = torch.linspace(0, 1, side, device="cuda", dtype=CHANGES.dtype)
    places, times = (part.reshape(-1, 1) for part in torch.meshgrid(axis, axis, indexing="ij"))
    parts = 4 if "smaller-evaluation-batch" in CHANGES else 1
    return torch.cat([solution(*pair).detach() for pair in zip(places.chunk(parts), times.chunk(parts))])


solution = Solution().to("cuda", CHANGES.dtype)
CHANGES.checkpoint("layers.*", solution)
optimizer = CHANGES.optimizer(torch.optim.Adam, solution, lr=1e-3)
points, accumulate = CHANGES.batches(12288)
for step in range(5):
    optimizer.zero_grad()
    for _ in range(accumulate):
        with CHANGES.around_forward():
            loss = residual(solution, points).square().mean() + boundary(solution, points // 8).square().mean()
        (loss / accumulate).backward()
        del loss
    optimizer.step()
    if step % 2 == 1:
        with torch.set_grad_enabled("no-grad" not in CHANGES):
            field = on_grid(solution)
changes.done()
