"""PyTorch's own recorder, run in the same process as ours: what every recorded event is compared with.

`start()` before the first CUDA allocation, `finish()` at the end: writes PyTorch's snapshot as JSON to the file named by
MEMTRACE_TEST_ORACLE (as the pickle that it is where that ends in `.pickle`), with the allocators' own statistics under the keys
"statistics" and "host_statistics". Without the variable both do nothing. MEMTRACE_TEST_ORACLE_PICKLE=FILE asks for the pickle beside the
JSON. MEMTRACE_TEST_STATISTICS=FILE asks for the statistics alone, where the recorder refuses.
With MEMTRACE_TEST_ORACLE_LAST=1 the process ends in `finish()`, so that nothing happens that PyTorch's snapshot does not have.
"""

import gc
import json
import os
import pickle
import sys

import torch

PATH = os.environ.get("MEMTRACE_TEST_ORACLE")
PICKLE = os.environ.get("MEMTRACE_TEST_ORACLE_PICKLE")
STATISTICS = os.environ.get("MEMTRACE_TEST_STATISTICS")
LAST = os.environ.get("MEMTRACE_TEST_ORACLE_LAST") == "1"


def start():
    if PATH:
        torch.cuda.memory._record_memory_history(max_entries=10**7, stacks="python")


def finish():
    if PATH:
        dump()
    if STATISTICS:
        with open(STATISTICS, "w") as f:
            json.dump(statistics(), f)
    if LAST:
        sys.stdout.flush()
        os._exit(0)


def statistics():
    found = {"statistics": [torch.cuda.memory_stats(d) for d in range(torch.cuda.device_count())]}
    # PyTorch 2.8 and later.
    if hasattr(torch.cuda, "host_memory_stats"):
        found["host_statistics"] = torch.cuda.host_memory_stats()
    return found


def dump():
    # What hangs in cycles must not be freed later than the snapshot.
    gc.collect()
    gc.disable()
    torch.cuda.synchronize()
    found = statistics()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    if PATH.endswith(".pickle"):
        with open(PATH, "wb") as f:
            pickle.dump(snapshot, f)
        return
    if PICKLE:
        with open(PICKLE, "wb") as f:
            pickle.dump(snapshot, f)
    snapshot.update(found)
    with open(PATH, "w") as f:
        json.dump(snapshot, f)
