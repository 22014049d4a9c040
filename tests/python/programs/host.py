"""CPU tensors have figures too."""

import gpu_memtrace
import torch

kept = torch.zeros(1 << 20)
with gpu_memtrace.annotate("host"):
    more = torch.zeros(1 << 18)
memory = gpu_memtrace.current()
assert memory[-1].allocated_bytes == (4 << 20) + (1 << 20), memory
assert memory.allocated_bytes == 0, "the sum is that of GPUs"
text = str(memory)
assert text.startswith("CPU tensors: 5.00 MiB allocated\n  ") and "bytes" not in text, text
assert "allocated_bytes=5242880" in repr(memory), "the form for programs"


def work() -> None:
    first = torch.zeros(3 << 18)
    second = torch.zeros(16 << 18)
    del first
    second.add_(torch.zeros(16 << 18))


work()
# The statistics of the line profiler are the figures of `memtrace lines`.
rows = gpu_memtrace.lines(work, statistics=True)
net = []
for row in rows:
    for figure in ("active_bytes", "allocated_bytes", "reserved_bytes"):
        of = {value: row.statistics[f"{figure}.all.{value}"] for value in ("peak", "allocated", "freed")}
        assert of["peak"] == row.active_peak_bytes == row.reserved_peak_bytes, (figure, of, row)
        assert of["allocated"] - of["freed"] == row.net_bytes, (figure, of, row)
    net.append(row.net_bytes >> 20)
assert net == [3, 16, -3, 0], rows
report = gpu_memtrace.tensors()
assert report["cpu"].used_bytes == (4 << 20) + (1 << 20), str(report)
print("done")
