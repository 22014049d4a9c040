"""Measured convolutions request over the simulated CUDA what they requested on a GPU, in all three passes."""

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


def measured_again(row):
    """What `simulate/measurements/convolutions.py` measures."""
    layout = torch.contiguous_format
    if row["channels_last"]:
        layout = torch.channels_last if len(row["input"]) == 4 else torch.channels_last_3d
    options = {"device": "cuda", "dtype": getattr(torch, row["data_type"])}
    x = torch.empty(row["input"], **options).to(memory_format=layout)
    w = torch.empty(row["weight"], **options).to(memory_format=layout)
    arguments = (row["stride"], row["padding"], row["dilation"], bool(row["transposed"]), [0] * len(row["stride"]), row["groups"])
    forward, y = extra(lambda: torch.ops.aten.convolution(x, w, None, *arguments))
    masks = ((True, False, False), (False, True, False))
    return [forward] + [extra(lambda mask=mask: torch.ops.aten.convolution_backward(y, x, w, None, *arguments, mask))[0] for mask in masks]


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
    passes = different = 0
    for figures in ROWS["rows"][::EVERY]:
        row = dict(zip(ROWS["columns"], figures))
        expected = [row[name] for name in ("forward", "backward_input", "backward_weight")]
        found = measured_again(row)
        passes += len(expected)
        wrong = [name for name, a, b in zip(("forward", "backward_input", "backward_weight"), expected, found) if a != b]
        different += len(wrong)
        if wrong:
            print({**row, "found": found})
    print(f"{different} of {passes} passes differ")
    assert different == 0


if __name__ == "__main__":
    main()
