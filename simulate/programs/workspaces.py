"""Measured convolutions request over the simulated CUDA what they requested on a GPU, in all three passes.

With `torch.backends.cudnn.benchmark`, the first call requests the largest workspace, and the second one that of the
algorithm that is chosen without it.
"""

import ctypes
import gzip
import json
import pathlib

import torch

ROWS = json.loads(gzip.decompress((pathlib.Path(__file__).parents[1] / "measurements" / "convolutions.json.gz").read_bytes()))
# Every row takes some milliseconds.
EVERY = 23


def extra(call):
    """The bytes that a call requested at most beyond those of its result, and the result."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"], result


PASSES = ("forward", "backward_input", "backward_weight")


def measured_again(row):
    """What `simulate/measurements/convolutions.py` measures."""
    layout = torch.contiguous_format
    if row["channels_last"]:
        layout = torch.channels_last if len(row["input"]) == 4 else torch.channels_last_3d
    options = {"device": "cuda", "dtype": getattr(torch, row["data_type"])}
    x = torch.empty(row["input"], **options).to(memory_format=layout)
    w = torch.empty(row["weight"], **options).to(memory_format=layout)
    arguments = (row["stride"], row["padding"], row["dilation"], bool(row["transposed"]), [0] * len(row["stride"]), row["groups"])
    x_and_weight = ((True, False, False), (False, True, False))

    def backward(mask):
        return torch.ops.aten.convolution_backward(y, x, w, None, *arguments, mask)

    forward, y = extra(lambda: torch.ops.aten.convolution(x, w, None, *arguments))
    return [forward] + [extra(lambda mask=mask: backward(mask))[0] for mask in x_and_weight]


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
    plain = [(row, [row[name] for name in PASSES]) for row in rows[::EVERY]]
    differences = [1 for row, expected in plain if differ(row, expected, measured_again(row))]
    # PyTorch remembers the algorithm of a convolution that it has computed, so that the rows are others.
    torch.backends.cudnn.benchmark = True
    tried = [row for row in rows if can_be_tried(row) and row not in rows[::EVERY]][:: EVERY // 2]
    for row in tried:
        if differ(row, row["benchmarked"], measured_again(row)) or differ(row, [row[name] for name in PASSES], measured_again(row)):
            differences.append(1)
    print(f"{len(differences)} of {len(plain)} convolutions, and of {len(tried)} with benchmarks, differ")
    assert len(tried) > 200 and not differences


def can_be_tried(row):
    """Whether the row was measured with benchmarks, and the simulated GPU has the memory. Where an image and the filter have one pixel, no
    layout can be seen, and two measured rows look alike."""
    return row["benchmarked"] and max(row["benchmarked"]) < 1 << 32 and max(row["input"][2:] + row["weight"][2:]) > 1


def differ(row, expected, found):
    """Whether bytes of passes differ, and prints them."""
    if expected != found:
        print({**row, "found": found})
    return expected != found


if __name__ == "__main__":
    main()
