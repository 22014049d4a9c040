"""Programs that ask for no values. Prints all events of the allocator of each, which are the same with and without simulated values."""

import json

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda"


def accumulated():
    x = torch.zeros(64, 1 << 16, device=DEVICE, requires_grad=True)
    y = x * 1
    sum(y[i].sum() for i in range(4)).backward()


def perceptron():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = functional.cross_entropy(model(torch.randn(32, 64, device=DEVICE)), torch.randint(0, 10, (32, ), device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def attention():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.randn(4, 32, 64, device=DEVICE)).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 15 * 15, 10)).to(DEVICE)
    model(torch.randn(8, 3, 32, 32, device=DEVICE)).softmax(-1).log().mean().backward()


def recurrent_state():
    """Tensors that are written in parts, read as views and used again in the backward pass."""
    state, weight = torch.zeros(16, 32, device=DEVICE), nn.Parameter(torch.randn(32, 32, device=DEVICE))
    outputs = torch.empty(10, 16, 32, device=DEVICE)
    for step in range(10):
        state = torch.tanh(state @ weight) + torch.rand(16, 32, device=DEVICE)
        outputs[step] = state
    (outputs[1:] - outputs[:-1]).cumsum(0).abs().sum().backward()


def indexing():
    table = nn.Embedding(100, 16).to(DEVICE)
    tokens = torch.arange(64, device=DEVICE).view(4, 16) % 100
    sums = torch.zeros(100, 16, device=DEVICE).index_add(0, tokens.flatten(), table(tokens).view(-1, 16))
    mask = (torch.rand(100, 16, device=DEVICE) < 0.5) & (sums > 0)
    torch.where(mask, sums, -sums).masked_fill(mask, 0).topk(4, dim=1).values.mean().backward()


def events(program):
    """The actions and sizes of the allocator while a program runs."""
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    program()
    (trace, ) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.empty_cache()
    return [(event["action"], event["size"]) for event in trace if event["action"] != "snapshot"]


torch.zeros(1, device=DEVICE)
PROGRAMS = [accumulated, perceptron, attention, convolutions, recurrent_state, indexing]
print(json.dumps({program.__name__: events(program) for program in PROGRAMS}))
