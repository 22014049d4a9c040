"""Asks cuDNN on a GPU for the spaces of recurrent layers of random sizes.

    python recurrent_spaces.py ROWS OUT.json

Nothing runs: cuDNN only says what it would need. `columns` names the figures of a row. `mode`, `data_type` and
`algorithm` are the numbers of cuDNN's enumerations, `steps` is the sum of the lengths of the sequences, and the last
four figures are bytes.
"""

import ctypes
import json
import random
import sys
from ctypes import byref, c_float, c_int, c_size_t, c_ulonglong, c_void_p

import torch

COLUMNS = ("mode", "data_type", "algorithm", "directions", "layers", "batch", "longest", "input", "hidden", "projection", "dropout", "packed",
           "steps", "weights", "inference_workspace", "training_workspace", "reserve")
LSTM, FLOAT, HALF, BFLOAT16 = 2, 0, 2, 9
STANDARD, PERSIST_STATIC, PERSIST_STATIC_SMALL_H = 0, 1, 3
DOUBLE_BIAS, LINEAR_INPUT, TENSOR_OP_MATH = 2, 0, 1
COMMON = (64, 128, 256, 512, 1024)


class Cudnn:
    """The functions that are asked, with one object of each kind."""

    def __init__(self):
        torch.cuda.init()
        self.library = ctypes.CDLL("libcudnn.so.9")
        self.handle = self.object("cudnnCreate")
        self.layers = self.object("cudnnCreateRNNDescriptor")
        self.data = self.object("cudnnCreateRNNDataDescriptor")
        self.kept, self.dropped = self.object("cudnnCreateDropoutDescriptor"), self.object("cudnnCreateDropoutDescriptor")
        size = c_size_t()
        self.library.cudnnDropoutGetStatesSize(self.handle, byref(size))
        self.states = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        self.library.cudnnSetDropoutDescriptor(self.kept, self.handle, c_float(0), None, c_size_t(0), c_ulonglong(0))
        self.library.cudnnSetDropoutDescriptor(self.dropped, self.handle, c_float(0.2), c_void_p(self.states.data_ptr()), size, c_ulonglong(1))

    def object(self, create):
        made = c_void_p()
        if status := getattr(self.library, create)(byref(made)):
            sys.exit(f"{create}: {status}")
        return made

    def spaces(self, mode, data_type, algorithm, directions, layers, batch, longest, size, hidden, projection, dropout, packed, lengths):
        """Weights, workspaces of inference and training, and reserved space in bytes; None for what cuDNN does not support."""
        math = TENSOR_OP_MATH if data_type == HALF else 0
        statuses = [self.library.cudnnSetRNNDescriptor_v8(
            self.layers, algorithm, mode, DOUBLE_BIAS, directions - 1, LINEAR_INPUT, data_type, FLOAT, math, size, hidden, projection, layers,
            self.dropped if dropout else self.kept, 0 if packed else 1)]
        statuses.append(self.library.cudnnSetRNNDataDescriptor(
            self.data, data_type, packed, longest, batch, size, (c_int * batch)(*lengths), None))
        weights, inference, training, reserve = (c_size_t() for _ in range(4))
        statuses.append(self.library.cudnnGetRNNWeightSpaceSize(self.handle, self.layers, byref(weights)))
        statuses.append(self.library.cudnnGetRNNTempSpaceSizes(self.handle, self.layers, 0, self.data, byref(inference), None))
        statuses.append(self.library.cudnnGetRNNTempSpaceSizes(self.handle, self.layers, 1, self.data, byref(training), byref(reserve)))
        return None if any(statuses) else [weights.value, inference.value, training.value, reserve.value]


def configuration(common):
    """A random configuration, with usual sizes or with any."""
    choose, any_of = random.choice, random.randint
    mode, data_type = choose((1, 2, 2, 3, 3)), choose((FLOAT, FLOAT, HALF, BFLOAT16))
    algorithm = choose((STANDARD, STANDARD, STANDARD, PERSIST_STATIC, PERSIST_STATIC_SMALL_H))
    batch, longest = (choose((8, 16, 32, 64, 128)) if common else any_of(1, 99)), any_of(1, 150)
    size, hidden = (choose(COMMON), choose(COMMON)) if common else (any_of(1, 900), any_of(1, 900))
    if algorithm == PERSIST_STATIC_SMALL_H:
        hidden = any_of(1, 400)
    projection = choose((hidden, hidden, hidden, max(hidden // 2, 1), max(hidden // 3, 1))) if (mode, algorithm) == (LSTM, STANDARD) else hidden
    packed = choose((0, 0, 1)) if algorithm == STANDARD else 0
    lengths = sorted((any_of(1, longest) if packed else longest for _ in range(batch)), reverse=True)
    lengths[0] = longest
    return [mode, data_type, algorithm, choose((1, 2)), any_of(1, 5), batch, longest, size, hidden, projection, choose((0, 0, 1)), packed], lengths


def main():
    random.seed(7)
    cudnn = Cudnn()
    rows = []
    while len(rows) < int(sys.argv[1]):
        options, lengths = configuration(common=len(rows) % 2)
        if spaces := cudnn.spaces(*options, lengths):
            rows.append([*options, sum(lengths), *spaces])
    with open(sys.argv[2], "w") as file:
        json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                   "columns": COLUMNS, "rows": rows}, file)


if __name__ == "__main__":
    main()
