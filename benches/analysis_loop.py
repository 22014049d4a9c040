"""The program that `analysis` records: a GPT-2 (12 layers, narrow) and torchvision's ResNet-50, trained in turns.

    python analysis_loop.py EVENTS [SNAPSHOT [DUMPS]]

Runs until there are EVENTS events. With SNAPSHOT, PyTorch's own recorder runs and writes it DUMPS times; the times are
printed as JSON. PyTorch counts each of these as an event: an allocation, a request to free, a completed free.
"""

import gc
import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
import torchvision

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests/programs/torch"))
from decoder import GPT  # noqa: E402

WIDTH, HEADS, VOCABULARY, CONTEXT, LAYERS = 128, 4, 500, 32, 12


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def train(events):
    """Trains both models until there are `events` events; returns the number of steps."""
    gpt, resnet = GPT(LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, tied=False).cuda(), torchvision.models.resnet50().cuda()
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
    """The peak resident memory of this process, in MiB."""
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
