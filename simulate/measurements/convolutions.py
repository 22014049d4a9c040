"""Measures on a GPU which workspaces cuDNN requests for convolutions: those of models, and random ones.

    python convolutions.py SECONDS OUT.json

`columns` names the figures of a row. The last three are bytes: by how much each pass raised PyTorch's peak of requested
memory above its own results. `source` is the model, or `random`. Random convolutions are measured for SECONDS.
"""

import itertools
import json
import math
import random
import sys
import time

import torch
import torch.nn as nn

COLUMNS = ("source", "data_type", "channels_last", "transposed", "groups", "input", "weight", "stride", "padding", "dilation",
           "forward", "backward_input", "backward_weight")
TORCHVISION = ("resnet18", "resnet50", "resnext50_32x4d", "vgg16", "mobilenet_v3_large", "densenet121", "efficientnet_b0", "regnet_y_1_6gf",
               "convnext_tiny", "googlenet", "squeezenet1_1", "shufflenet_v2_x1_0")
TIMM = ("resnetv2_50", "efficientnetv2_rw_s", "convnext_nano", "regnety_016", "dm_nfnet_f0", "repvgg_a2")
CHANNELS = (1, 3, 4, 8, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
LENGTHS = (50, 100, 200, 400, 1000, 3000, 16000)
SIDES = (5, 7, 8, 14, 16, 20, 28, 32, 38, 56, 64, 75, 112, 128, 224, 256, 300)
VOLUMES = ((8, 14, 14), (8, 28, 28), (16, 28, 28), (16, 56, 56), (16, 112, 112))
# The most bytes of a tensor, and the most elements of a filter, of a random convolution.
LARGEST_TENSOR, LARGEST_FILTER = 1e9, 4e7
BATCH = 16


def models():
    """Names, constructors, and the shapes of one input."""
    import timm
    import torchvision

    segmentation = torchvision.models.segmentation
    image, small = (3, 224, 224), (3, 256, 256)
    yield from ((name, getattr(torchvision.models, name), image) for name in TORCHVISION)
    yield "inception_v3", torchvision.models.inception_v3, (3, 299, 299)
    yield "deeplabv3_resnet50", lambda: segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None), small
    yield "fcn_resnet50", lambda: segmentation.fcn_resnet50(weights=None, weights_backbone=None), small
    yield from (("timm:" + name, lambda name=name: timm.create_model(name), image) for name in TIMM)


def of_models():
    """Each different convolution of the models once, for two sizes of the batch."""
    seen = set()
    for name, build, shape in models():
        calls = []
        model = build().eval().to("meta")
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                module.register_forward_hook(lambda module, inputs, _: calls.append((module, tuple(inputs[0].shape))))
        try:
            with torch.no_grad():
                model(torch.empty(BATCH, *shape, device="meta"))
        except NotImplementedError as error:
            print(f"{name}: only the {len(calls)} convolutions before {error}", file=sys.stderr)
        options = itertools.product(calls, (1, 4), ("float32", "float16"), (0, 1))
        for (module, size), scale, data_type, channels_last in options:
            row = (data_type, channels_last, int(isinstance(module, nn.ConvTranspose2d)), module.groups, (size[0] * scale, *size[1:]),
                   tuple(module.weight.shape), module.stride, module.padding, module.dilation)
            if row not in seen and not isinstance(module.padding, str):
                seen.add(row)
                yield name, row


def at_random(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if row := random_row(random.choice):
            yield "random", row


def random_row(choose):
    """A random convolution, or None if it would be too large or has no whole groups."""
    dimensions, batch, kernel = choose((1, 2, 2, 2, 2, 3)), choose((1, 2, 3, 4, 8, 16, 32, 64)), choose((1, 2, 3, 3, 3, 3, 4, 5, 7))
    transposed, stride, padding = random.random() < 0.1, choose((1, 1, 1, 2, 2, 4)), choose((0, kernel // 2, kernel // 2))
    dilation, inputs, outputs = choose((1, 1, 1, 1, 2, 4)), choose(CHANNELS), choose(CHANNELS)
    groups = choose((1, 1, 1, 1, 1, inputs, 32))
    groups = 1 if inputs % groups else groups
    outputs = inputs if groups == inputs > 1 else outputs
    side = choose(SIDES)
    size = [(choose(LENGTHS), ), (side, side), choose(VOLUMES)][dimensions - 1]
    data_type, channels_last = choose(("float32", "float16", "bfloat16")), choose((0, 1)) if dimensions > 1 else 0
    widest = max(inputs, outputs / stride**dimensions, outputs * stride**dimensions * transposed)
    large = batch * widest * math.prod(size) * 4 > LARGEST_TENSOR or outputs * inputs / groups * kernel**dimensions > LARGEST_FILTER
    if large or outputs % groups:
        return None
    channels = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    each = [[n] * dimensions for n in (kernel, stride, padding, dilation)]
    return data_type, channels_last, int(transposed), groups, (batch, inputs, *size), (*channels, *each[0]), *each[1:]


def extra(call):
    """The bytes that a call requested at most beyond those of its result."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    stats = torch.cuda.memory_stats()
    del result
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def passes(row):
    """The three passes of a convolution, as functions without arguments: forward, and the gradients of the input and of the weight. The
    forward pass comes first: the gradients need its result."""
    data_type, channels_last, transposed, groups, size, weight, stride, padding, dilation = row
    layout = (torch.channels_last if len(size) == 4 else torch.channels_last_3d) if channels_last else torch.contiguous_format
    options = {"device": "cuda", "dtype": getattr(torch, data_type)}
    arguments = (stride, padding, dilation, bool(transposed), [0] * len(stride), groups)
    x, w = (torch.zeros(shape, **options).to(memory_format=layout) for shape in (size, weight))
    outputs = []

    def forward():
        output = torch.ops.aten.convolution(x, w, None, *arguments)
        # A later call must not free what an earlier one returned.
        outputs.append(output)
        return output

    def backward(*mask):
        return torch.ops.aten.convolution_backward(outputs[0], x, w, None, *arguments, mask)

    return forward, lambda: backward(True, False, False), lambda: backward(False, True, False)


def measure(row):
    """The bytes of the three passes, or None where the convolution does not exist or is not supported."""
    try:
        return [extra(run) for run in passes(row)]
    except RuntimeError:
        return None


def main():
    torch.backends.cudnn.benchmark = False
    random.seed(1)
    rows = [[source, *row, *bytes_] for source, row in itertools.chain(of_models(), at_random(float(sys.argv[1]))) if (bytes_ := measure(row))]
    with open(sys.argv[2], "w") as file:
        json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                   "columns": COLUMNS, "rows": rows}, file)


if __name__ == "__main__":
    main()
