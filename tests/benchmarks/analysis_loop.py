"""The recording that the part `analysis` reads: a GPT-2 (12 layers, narrow) and torchvision's ResNet-50, trained in turns, for so many events.

    python analysis_loop.py EVENTS [SNAPSHOT [DUMPS]]

With SNAPSHOT PyTorch's own recorder runs and writes it, DUMPS times; what that took is printed as JSON. An event is what PyTorch counts
as one: an allocation, a request to free, a completed free.
"""

import gc
import json
import pathlib
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision

WIDTH, HEADS, VOCABULARY, CONTEXT, LAYERS = 128, 4, 500, 32, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def train(events):
    """Steps of both models until there were so many events; gives how many steps."""
    gpt, resnet = GPT().cuda(), torchvision.models.resnet50().cuda()
    adamw = torch.optim.AdamW(gpt.parameters(), lr=3e-4)
    sgd = torch.optim.SGD(resnet.parameters(), lr=0.1, momentum=0.9)
    steps = 0
    while 3 * allocations() < events:
        ids = torch.zeros(2, CONTEXT, dtype=torch.long).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = gpt(ids)
        F.cross_entropy(logits.float().view(-1, VOCABULARY), ids.view(-1)).backward()
        adamw.step()
        adamw.zero_grad()
        images, labels = torch.randn(2, 3, 32, 32, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        F.cross_entropy(resnet(images), labels).backward()
        sgd.step()
        sgd.zero_grad()
        steps += 1
    return steps


def high_water():
    """The most memory this process ever used, in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main():
    events, snapshot = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    if not snapshot:
        train(events)
        return
    torch.cuda.memory._record_memory_history(max_entries=2 * events, stacks="python")
    start = time.perf_counter()
    steps = train(events)
    recorded = time.perf_counter() - start
    torch.cuda.synchronize()
    gc.collect()
    before = high_water()
    dumps = []
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):
        start = time.perf_counter()
        torch.cuda.memory._dump_snapshot(snapshot)
        dumps.append(time.perf_counter() - start)
    print(json.dumps({"allocations": allocations(), "steps": steps, "record_s": recorded, "dump_s": dumps, "record_mib": before,
                      "dump_mib": high_water(), "bytes": pathlib.Path(snapshot).stat().st_size, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
