"""Measured convolutions request over the simulated CUDA what they requested on a GPU, in all three passes.

With `torch.backends.cudnn.benchmark`, the first call requests the largest workspace, and the second one that of the
algorithm that is chosen without it.
"""

import ctypes
import gzip
import json
import pathlib
import sys

import torch

MEASUREMENTS = pathlib.Path(__file__).parents[1] / "measurements"
sys.path.insert(0, str(MEASUREMENTS))
from convolutions import measure  # noqa: E402

ROWS = json.loads(gzip.decompress((MEASUREMENTS / "convolutions.json.gz").read_bytes()))
# Every row takes some milliseconds.
EVERY = 23


PASSES = ("forward", "backward_input", "backward_weight")


def check_heuristics():
    """A program gets as many engine configurations as it requests: PyTorch 2.15 requests one, and takes each for filled in."""
    cudnn = ctypes.CDLL(f"libcudnn.so.{torch.backends.cudnn.version() // 10000}")
    heuristics_kind, configuration_kind, results, descriptor_kind = 4, 3, 202, 15
    heuristics, configuration, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
    assert cudnn.cudnnBackendCreateDescriptor(heuristics_kind, ctypes.byref(heuristics)) == 0
    assert cudnn.cudnnBackendCreateDescriptor(configuration_kind, ctypes.byref(configuration)) == 0
    found = []
    for requested, array in ((0, None), (1, ctypes.byref(configuration))):
        assert cudnn.cudnnBackendGetAttribute(heuristics, results, descriptor_kind, ctypes.c_int64(requested), ctypes.byref(count), array) == 0
        found.append(count.value)
    assert found[0] > 1 and found[1] == 1, found


def main():
    torch.cuda.init()
    check_heuristics()
    rows = [dict(zip(ROWS["columns"], figures)) for figures in ROWS["rows"]]
    # PyTorch remembers the algorithm of a convolution that it has computed, so that other rows are computed with benchmarks.
    plain = rows[::EVERY]
    computed = {key(row) for row in plain}
    tried = [row for row in rows if can_be_tried(row) and key(row) not in computed][:: EVERY // 2]
    differences = sum(differ(row, chosen(row)) for row in plain)
    torch.backends.cudnn.benchmark = True
    differences += sum(differ(row, row["benchmarked"]) or differ(row, chosen(row)) for row in tried)
    print(f"{differences} of {len(plain)} convolutions, and of {len(tried)} with benchmarks, differ")
    assert len(tried) > 200 and differences == 0


def arguments(row):
    """The properties that distinguish a convolution."""
    return [row[name] for name in ROWS["columns"][1:10]]


def key(row):
    return json.dumps(arguments(row))


def chosen(row):
    """The bytes of each pass without benchmarks."""
    return [row[name] for name in PASSES]


def can_be_tried(row):
    """Whether the row was measured with benchmarks, and the simulated GPU has the memory. Where an image and the filter have one pixel, no
    layout can be seen, and two measured rows look alike."""
    return row["benchmarked"] and max(row["benchmarked"]) < 1 << 32 and max(row["input"][2:] + row["weight"][2:]) > 1


def differ(row, expected):
    """Whether the passes request other bytes now, and prints them."""
    found = measure(arguments(row))
    if expected != found:
        print({**row, "found": found})
    return expected != found


if __name__ == "__main__":
    main()
