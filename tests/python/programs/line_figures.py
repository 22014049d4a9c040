"""The figures of each line against torch.cuda.memory_stats, read between the same statements."""

import gpu_memtrace
import torch

FIGURES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
FIGURES += ("allocation", "active", "segment", "inactive_split")
MIB = 1 << 20


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def profiled():
    a = empty(3 * MIB)
    b = [empty(1000 * i) for i in range(1, 40)]
    c = a + 1
    del a
    small = [empty(100) for _ in range(3000)]; del small  # noqa: E702
    d = empty(50 * MIB)
    b.clear()
    torch.cuda.empty_cache()
    c = (c + 1) + (c + 2)
    del c, d


STATEMENTS = [line.strip() for line in __import__("inspect").getsource(profiled).splitlines()[1:]]


def measured():
    """The expected figures of each statement."""
    found, names = {}, dict(globals())
    for statement in STATEMENTS:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        exec(statement, names)
        stats = torch.cuda.memory_stats()
        found[statement] = {
            f"{figure}.{pool}.{kind}": stats[f"{figure}.{pool}.{kind}"]
            for figure in FIGURES
            for pool in ("all", "large_pool", "small_pool")
            for kind in ("current", "peak", "allocated", "freed")
        }
    torch.cuda.empty_cache()
    return found


expected = measured()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
profiled()
rows = gpu_memtrace.lines(profiled, statistics=True)
assert [row.text.strip() for row in rows] == STATEMENTS, rows
for row in rows:
    want, have = expected[row.text.strip()], dict(row.statistics)
    wrong = {key: (value, have[key]) for key, value in want.items() if have[key] != value}
    assert not wrong, f"{row.text}: (PyTorch, memtrace): {wrong}"
    assert row.active_peak_bytes == want["active_bytes.all.peak"]
    assert row.net_bytes == want["allocated_bytes.all.allocated"] - want["allocated_bytes.all.freed"]
assert len(rows) == len(STATEMENTS) == 10

# Only what happens in ranges of this name counts.
with gpu_memtrace.annotate("range"):
    profiled()
profiled()
within = gpu_memtrace.lines(profiled, within="range", statistics=True)
assert [row.allocated_bytes for row in within] == [row.allocated_bytes for row in rows]
assert all(row.times == 1 for row in within), within
assert [row.times for row in gpu_memtrace.lines(profiled)] == [3] * 10
assert gpu_memtrace.lines(profiled, within="another name") == []
print("done")
