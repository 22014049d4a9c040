"""The models that `training` and `memory` measure, each with a training step. `make(name, torch)` returns the step as a
function.

On a GPU they have usual training sizes. Over the simulated CUDA they are small models of the same shape: no kernel runs
there, so only the CPU's work remains.
"""

import sys

import frame

BATCH = {"resnet50-1": 1, "resnet50-32": 32}
NAMES = {
    "eager": "eager loop, 300 tiny operations",
    "mlp": "MLP of 20 layers, width 64, Adam",
    "resnet50-1": "ResNet-50, batch 1, SGD with momentum",
    "resnet50-32": "ResNet-50, batch 32, SGD with momentum",
    "gpt2": "GPT-2, 124 M parameters, batch 8 x 1024, bf16 autocast, AdamW" if frame.GPU else "GPT-2 of 12 layers, width 96, bf16 autocast, AdamW",
}
IMAGE = 224 if frame.GPU else 64


def eager(torch):
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")

    def step():
        with torch.no_grad():
            z = x
            for _ in range(100):
                z = torch.relu(z * y + x)

    return step


def mlp(torch):
    layers = [layer for _ in range(20) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def resnet50(torch, batch):
    import torchvision

    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch, 3, IMAGE, IMAGE, device="cuda")
    labels = torch.zeros(batch, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def gpt2(torch):
    sys.path.append(str(frame.ROOT / "tests/programs/torch"))
    from decoder import GPT

    functional = torch.nn.functional
    layers, width, heads, vocabulary, context, batch = (12, 768, 12, 50257, 1024, 8) if frame.GPU else (12, 96, 4, 1000, 64, 2)
    model = GPT(layers, width, heads, vocabulary, context).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.zeros(batch, context, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids)
        functional.cross_entropy(logits.float().view(-1, vocabulary), ids.view(-1)).backward()
        optimizer.step()

    return step


def make(name, torch):
    if name in BATCH:
        return resnet50(torch, BATCH[name])
    return {"eager": eager, "mlp": mlp, "gpt2": gpt2}[name](torch)
