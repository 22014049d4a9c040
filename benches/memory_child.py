"""A measured process of `memory`.

`held KIND EVENTS`: makes events at stack depth 20, with PyTorch's recorder for kind `python`. Prints its process id and
waits for a line on stdin. `bytes MODEL EVENTS`: trains until there are EVENTS events, with PyTorch's recorder. Prints
the size of its pickle and the number of events in it.
"""

import json
import os
import pickle
import sys

import frame
import models
import torch


def history():
    torch.cuda.memory._record_memory_history(stacks="python")


def wait_with_events(kind, events):
    def at_depth(depth):
        if depth > 1:
            return at_depth(depth - 1)
        # Three events: an allocation, the request to free it, and the completed free.
        for _ in range(events // 3):
            torch.empty(1000, device="cuda")

    torch.empty(1000, device="cuda")
    if kind == "python":
        history()
    at_depth(20)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    sys.stdin.readline()


def size_of(model, events):
    history()
    step = models.make(model, torch)
    path = frame.SCRATCH / f"{model}.pickle"
    count = 0
    while count < events:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step()
        count += 3 * (torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    torch.cuda.memory._dump_snapshot(str(path))
    with path.open("rb") as file:
        found = sum(map(len, pickle.load(file)["device_traces"]))
    print(json.dumps({"bytes": path.stat().st_size, "events": found}))
    path.unlink()
    sys.stdout.flush()
    # Skip the frees at the process's end, which no pickle contains.
    os._exit(0)


if __name__ == "__main__":
    {"held": wait_with_events, "bytes": size_of}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
