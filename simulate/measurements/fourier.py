"""Measures on a GPU which workspaces cuFFT requests for plans that are made as PyTorch makes them.

    python fourier.py SECONDS OUT.jsonl.gz [SEED]

The first line says what was measured. A row has the kind of the transform, the precision, the lengths, the batch, the layout, and the
bytes, or the negative status of cuFFT. The plans are random; the file in the repository has common lengths of sound and images, too.
"""

import ctypes
import gzip
import json
import math
import random
import sys
import time

import torch

# The input, output and execution types (`cudaDataType`).
KINDS = {"c2c": {"float": (4, 4, 4), "double": (5, 5, 5), "half": (6, 6, 6)}, "r2c": {"float": (0, 4, 4), "double": (1, 5, 5), "half": (2, 6, 6)},
         "c2r": {"float": (4, 0, 4), "double": (5, 1, 5), "half": (6, 2, 6)}}
LAYOUTS = ("simple", "simple", "explicit", "strided", "padded")
LIBRARY = "libcufft.so.12"
MOST_ELEMENTS = 1 << 29
SMOOTH = sorted(n for a in range(23) for b in range(8) for c in range(6) for d in range(5) if (n := 2**a * 3**b * 5**c * 7**d) <= 1 << 22)


def layouts(kind, lengths, batch, layout):
    """The embedding, the stride and the distance of the input and of the output."""
    if layout == "simple":
        return (None, 1, 1), (None, 1, 1)
    half = [*lengths[:-1], lengths[-1] // 2 + 1]
    inner, outer = half if kind == "c2r" else lengths, half if kind == "r2c" else lengths
    if layout == "strided":
        return (inner, batch, 1), (outer, batch, 1)
    inner = [*inner[:-1], inner[-1] + 2 * (layout == "padded")]
    return (inner, 1, math.prod(inner)), (outer, 1, math.prod(outer))


def workspace(library, kind, precision, lengths, batch, layout):
    def array(numbers):
        return numbers and (ctypes.c_longlong * len(numbers))(*numbers)

    of_input, of_output, execution = KINDS[kind][precision]
    plan, size = ctypes.c_int(), ctypes.c_size_t()
    library.cufftCreate(ctypes.byref(plan))
    library.cufftSetAutoAllocation(plan, 0)
    sides = [(array(embedding), ctypes.c_longlong(stride), ctypes.c_longlong(distance)) for embedding, stride, distance in layouts(kind, lengths, batch, layout)]
    status = library.cufftXtMakePlanMany(plan, len(lengths), array(lengths), *sides[0], of_input, *sides[1], of_output, ctypes.c_longlong(batch),
                                         ctypes.byref(size), execution)
    library.cufftDestroy(plan)
    return -status if status else size.value


def length(choose, most):
    return choose((choose(SMOOTH[:300]), random.randint(1, most), 1 << random.randint(0, most.bit_length() - 1)))


def random_plan(choose):
    rank = choose((1, 1, 1, 2, 2, 3))
    lengths = [length(choose, (choose((256, 20000, 1 << 21)), 1000, 130)[rank - 1]) for _ in range(rank)]
    return choose(list(KINDS)), choose(("float", "float", "float", "double", "half")), lengths, choose((1, 1, 2, 3, 7, 16, 50, 256)), choose(LAYOUTS)


def main():
    end = time.monotonic() + float(sys.argv[1])
    random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    torch.cuda.init()
    torch.empty(1, device="cuda")
    library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if LIBRARY in line))
    version = ctypes.c_int()
    library.cufftGetVersion(ctypes.byref(version))
    with gzip.open(sys.argv[2], "wt") as file:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cufft": version.value}), file=file)
        while time.monotonic() < end:
            plan = random_plan(random.choice)
            if math.prod(plan[2]) * plan[3] <= MOST_ELEMENTS:
                print(json.dumps([*plan, workspace(library, *plan)]), file=file)


if __name__ == "__main__":
    main()
