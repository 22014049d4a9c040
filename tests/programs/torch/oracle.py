"""PyTorch's own recorder in the process that memtrace records: the oracle of every recorded event.

Call `start()` before the first CUDA allocation. `finish()` writes PyTorch's snapshot as JSON to the file in
MEMTRACE_TEST_ORACLE, or as a pickle if its name ends in `.pickle`. The keys "statistics" and "host_statistics" have the
allocators' own statistics. Without the variable both do nothing. MEMTRACE_TEST_ORACLE_PICKLE=FILE adds the pickle.
MEMTRACE_TEST_STATISTICS=FILE writes only statistics, for allocators that the recorder does not support. With
MEMTRACE_TEST_ORACLE_LAST=1 the process ends in `finish()`, after the snapshot.
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
    # Objects in reference cycles must be freed before the snapshot.
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
