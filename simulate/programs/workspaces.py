"""Measured convolutions request over the simulated CUDA what they requested on a GPU, in all three passes."""

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


def main():
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
