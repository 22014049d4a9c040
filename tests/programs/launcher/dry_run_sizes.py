"""Programs whose sizes depend on values, each written as its users would write it: `dry_run_sizes.py [NAME...]` prints the sizes as a JSON object.

Random numbers decide the sizes, so a GPU, the CPU (`DEVICE=cpu`) and a dry run agree but for chance.
"""

import json
import math
import os
import sys

import torch
from torch import nn
from torch.nn import functional

DEVICE = os.environ.get("DEVICE", "cuda")


def depth_band():
    depth = torch.rand(1 << 20, device=DEVICE) * 100
    near = (depth > 1) & (depth < 60)
    return {"near": int(near.sum()), "far": len(depth[~near]), "either": len(depth[(depth < 10) | (depth > 95)])}


def voxels():
    points = torch.rand(50_000, 3, device=DEVICE) * 20
    cells, inverse, counts = torch.unique((points / 0.5).floor().long(), dim=0, return_inverse=True, return_counts=True)
    features = torch.zeros(len(cells), 8, device=DEVICE).index_add_(0, inverse, torch.randn(len(points), 8, device=DEVICE))
    return {"cells": len(cells), "rows": features.shape[0], "crowded": int((counts > 1).sum())}


def token_dropping():
    tokens = torch.randn(64, 512, 32, device=DEVICE)
    keep = torch.rand(64, 512, device=DEVICE) < 0.15
    masked = torch.bernoulli(torch.full((64, 512), 0.4, device=DEVICE)).bool()
    dropped = functional.dropout(torch.ones(100_000, device=DEVICE), 0.3)
    return {"kept": tokens[keep].shape[0], "masked": tokens[masked & ~keep].shape[0], "zeros": int((dropped == 0).sum())}


def ball_query():
    points = torch.randn(2000, 3, device=DEVICE)
    edges = (torch.cdist(points, points) < 0.5).nonzero()
    norms = points.norm(dim=1)
    inside = ((points > -1) & (points < 1)).all(dim=1)
    return {"edges": len(edges), "far": int((norms > 2).sum()), "inside": points[inside].shape[0]}


def ray_sampling():
    origins, directions = torch.zeros(4096, 3, device=DEVICE), functional.normalize(torch.randn(4096, 3, device=DEVICE), dim=-1)
    steps = torch.linspace(0.1, 4, 64, device=DEVICE)
    samples = origins[:, None] + directions[:, None] * steps[None, :, None]
    occupied = (samples.abs() < 1).all(-1)
    chosen = samples[occupied]
    return {"samples": chosen.shape[0], "rays": int(occupied.any(1).sum())}


def boxes():
    corner, size = torch.rand(20_000, 2, device=DEVICE) * 512, torch.rand(20_000, 2, device=DEVICE) * 64
    boxes = torch.cat([corner, corner + size], dim=1).clamp(max=512)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    keep = (width >= 8) & (height >= 8)
    areas = (width * height)[keep]
    return {"kept": boxes[keep].shape[0], "large": int((areas > 32**2).sum()), "levels": torch.log2(areas.sqrt()).floor().clamp(3, 6).unique().numel()}


def small_policy():
    """A small network and its inputs are computed as on a GPU: greedy actions, returns, early ends of episodes."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    states = torch.linspace(-1, 1, 400).view(100, 4)
    policy, states = policy.to(DEVICE), states.to(DEVICE)
    logits = policy(states)
    rewards = logits.softmax(-1)[:, 0]
    return {"first": int((logits.argmax(-1) == 0).sum()), "good": len(rewards[rewards > 0.5]), "steps": int(rewards.cumsum(0).lt(20).sum())}


def gaussian_process():
    x = torch.linspace(0, 1, 200, device=DEVICE)[:, None]
    kernel = torch.exp(-torch.cdist(x, x)**2 / 0.02) + 1e-3 * torch.eye(200, device=DEVICE)
    rank = torch.linalg.matrix_rank(kernel - 1e-3 * torch.eye(200, device=DEVICE), tol=1e-4)
    sample = torch.distributions.MultivariateNormal(torch.zeros(200, device=DEVICE), kernel).sample((100, ))
    return {"rank": int(rank), "positive": int((sample > 0).sum()), "log": round(torch.logdet(kernel).item())}


def adaptive_ode():
    """Steps of a pair of Runge-Kutta methods, until the end of the interval."""
    t, dt, y, steps, tried = torch.tensor(0.0, device=DEVICE), torch.tensor(0.5, device=DEVICE), torch.ones(2, device=DEVICE), 0, 0
    matrix = torch.tensor([[0.0, 8.0], [-8.0, 0.0]], device=DEVICE)
    while t < 3 and tried < 2000:
        assert t + dt > t
        k1 = matrix @ y
        k2 = matrix @ (y + dt * k1)
        error, tried = (dt / 2 * (k2 - k1)).norm() / 1e-2, tried + 1
        if error <= 1:
            t, y, steps = t + dt, y + dt / 2 * (k1 + k2), steps + 1
        dt = dt * torch.clamp(0.9 / error.sqrt(), 0.2, 5)
    return {"steps": steps, "tried": tried}


def neighbors():
    features = torch.randn(300, 200, 16, device=DEVICE)
    weights = torch.sigmoid(features[..., 0] * 2)
    index = torch.multinomial(torch.ones(1000, device=DEVICE), 200)
    picked = (torch.rand(5000, device=DEVICE) * 1000).long()
    return {"strong": int((weights > 0.9).sum()), "index": index.unique().numel(), "picked": picked.unique().numel(),
            "counts": int((torch.bincount(picked, minlength=1000) > 8).sum())}


def curriculum():
    lengths = (torch.randn(4096, device=DEVICE) * 100 + 300).clamp(min=16, max=512).long()
    short = lengths[lengths < 200]
    mask = torch.arange(512, device=DEVICE)[None] < lengths[:, None]
    return {"short": len(short), "tokens": int(mask.sum()), "longest": int(lengths.max())}


def random_walks():
    nodes = torch.randint(0, 1000, (2, 20_000), device=DEVICE)
    degree = torch.bincount(nodes[0], minlength=1000)
    drop = torch.rand(20_000, device=DEVICE) > 0.2
    edges = nodes[:, drop]
    hubs = degree > degree.float().mean() + 2 * degree.float().std()
    return {"edges": edges.shape[1], "hubs": int(hubs.sum()), "pairs": torch.unique(edges, dim=1).shape[1]}


def spectrogram():
    signal = torch.randn(4, 16000, device=DEVICE)
    energy = signal.view(4, -1, 160).pow(2).mean(-1)
    voiced = energy > 1.05
    runs = torch.unique_consecutive(voiced.flatten()).numel()
    return {"voiced": int(voiced.sum()), "runs": runs, "peaks": int((signal.abs() > 3).sum())}


def replay_buffer():
    buffer = torch.zeros(10_000, 4, device=DEVICE)
    for place in range(0, 10_000, 1000):
        buffer[place:place + 1000] = torch.randn(1000, 4, device=DEVICE)
    buffer[:, 3] = (torch.rand(10_000, device=DEVICE) < 0.1).float()
    ended = buffer[:, 3] > 0.5
    return {"ended": int(ended.sum()), "negative": int((buffer[:, 0] < -1).sum()), "rows": buffer[ended].shape[0]}


def quantized():
    weights = torch.randn(1024, 1024, device=DEVICE)
    scale = weights.abs().amax(dim=1, keepdim=True) / 7
    codes = (weights / scale).round().clamp(-8, 7).to(torch.int8)
    return {"codes": codes.unique().numel(), "zeros": int((codes == 0).sum()), "outliers": (weights.abs() > 3).nonzero().shape[0]}


PROGRAMS = [depth_band, voxels, token_dropping, ball_query, ray_sampling, boxes, small_policy, gaussian_process, adaptive_ode, neighbors,
            curriculum, random_walks, spectrogram, replay_buffer, quantized]

if __name__ == "__main__":
    torch.manual_seed(math.floor(math.pi))
    chosen = sys.argv[1:]
    results = {}
    for program in PROGRAMS:
        if not chosen or program.__name__ in chosen:
            try:
                results[program.__name__] = program()
            except Exception as error:
                results[program.__name__] = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(results))
