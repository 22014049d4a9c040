"""Measures on a GPU what cuDNN takes: the workspaces of convolutions, and the spaces of recurrent layers.

    python cudnn.py OUT.json

One line of the result is one call: its configuration, and the bytes by which it raised PyTorch's peak of requested memory
above its own outputs. Convolutions are those of torchvision's and timm's models.
"""

import itertools
import json
import sys

import torch
import torch.nn as nn

torch.backends.cudnn.benchmark = False
DEVICE = "cuda"


def extra(call):
    """The bytes that a call requested beyond what it returns, and its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    after = torch.cuda.memory_stats()
    kept = after["requested_bytes.all.current"] - before
    return after["requested_bytes.all.peak"] - before - kept, kept, result


def convolutions():
    import timm
    import torchvision

    image = (3, 224, 224)
    models = {
        name: (getattr(torchvision.models, name), image, 16)
        for name in ("resnet18", "resnet50", "resnext50_32x4d", "vgg16", "mobilenet_v3_large", "densenet121", "efficientnet_b0",
                     "regnet_y_1_6gf", "convnext_tiny", "inception_v3", "googlenet", "squeezenet1_1", "shufflenet_v2_x1_0")
    }
    models["inception_v3"] = (torchvision.models.inception_v3, (3, 299, 299), 16)
    models["deeplabv3_resnet50"] = (lambda: torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None), (3, 256, 256), 8)
    models["fcn_resnet50"] = (lambda: torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None), (3, 256, 256), 8)
    for name in ("resnetv2_50", "efficientnetv2_rw_s", "convnext_nano", "regnety_016", "dm_nfnet_f0", "repvgg_a2"):
        models["timm:" + name] = (lambda name=name: timm.create_model(name), image, 16)
    seen = set()
    for name, (build, shape, batch) in models.items():
        calls = []
        model = build().eval().to("meta")
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                module.register_forward_hook(lambda m, i, o: calls.append((m, tuple(i[0].shape))))
        try:
            with torch.no_grad():
                model(torch.empty(batch, *shape, device="meta"))
        except NotImplementedError as error:
            print(f"{name}: only the {len(calls)} convolutions before {error}", file=sys.stderr)
        for (module, inputs), scale, dtype, channels_last in itertools.product(calls, (1, 4), (torch.float32, torch.float16), (False, True)):
            inputs = (inputs[0] * scale, *inputs[1:])
            key = (inputs, tuple(module.weight.shape), module.stride, module.padding, module.dilation, module.groups,
                   isinstance(module, nn.ConvTranspose2d), str(dtype), channels_last)
            if key in seen or isinstance(module.padding, str):
                continue
            seen.add(key)
            yield name, key


def measure_convolutions():
    for name, key in convolutions():
        inputs, weight, stride, padding, dilation, groups, transposed, dtype, channels_last = key
        layout = torch.channels_last if channels_last else torch.contiguous_format
        dtype = getattr(torch, dtype.removeprefix("torch."))
        x = torch.empty(inputs, device=DEVICE, dtype=dtype).to(memory_format=layout)
        w = torch.empty(weight, device=DEVICE, dtype=dtype).to(memory_format=layout)
        row = {"model": name, "input": inputs, "weight": weight, "stride": stride, "padding": padding, "dilation": dilation,
               "groups": groups, "transposed": transposed, "dtype": str(dtype).removeprefix("torch."), "channels_last": channels_last}
        try:
            arguments = (stride, padding, dilation, transposed, (0, 0), groups)
            row["forward"], _, y = extra(lambda: torch.ops.aten.convolution(x, w, None, *arguments))
            g = torch.empty_like(y)
            for part, mask in (("input", (True, False, False)), ("weight", (False, True, False))):
                row["backward_" + part], _, _ = extra(lambda: torch.ops.aten.convolution_backward(g, x, w, None, *arguments, mask))
        except RuntimeError as error:
            row["error"] = str(error).split("\n")[0]
        yield row


def measure_recurrent():
    kinds = ("LSTM", "GRU", "RNN")
    grid = itertools.product(kinds, (1, 2, 3), (False, True), (128, 512), ((16, 20), (64, 100)), (torch.float32, torch.float16), (0.0, 0.2))
    for kind, layers, bidirectional, hidden, (batch, length), dtype, dropout in grid:
        for projection in ((0, 64) if kind == "LSTM" else (0,)):
            options = {"proj_size": projection} if projection else {}
            module = getattr(nn, kind)(256, hidden, layers, bidirectional=bidirectional, dropout=dropout if layers > 1 else 0, **options)
            module = module.to(DEVICE, dtype)
            x = torch.empty(length, batch, 256, device=DEVICE, dtype=dtype)
            row = {"kind": kind, "layers": layers, "bidirectional": bidirectional, "input": 256, "hidden": hidden, "batch": batch,
                   "length": length, "dtype": str(dtype).removeprefix("torch."), "dropout": dropout, "projection": projection,
                   "weights": sum(p.numel() for p in module.parameters())}
            out = projection or hidden
            sizes = x.element_size() * (length * batch * out * (1 + bidirectional))
            state = x.element_size() * layers * (1 + bidirectional) * batch * out
            cell = x.element_size() * layers * (1 + bidirectional) * batch * hidden if kind == "LSTM" else 0
            module.flatten_parameters()
            with torch.no_grad():
                module.eval()
                transient, kept, result = extra(lambda: module(x))
                row["inference"] = {"transient": transient, "kept_beyond_outputs": kept - sizes - state - cell}
                del result
                module.train()
            transient, kept, result = extra(lambda: module(x))
            row["training"] = {"transient": transient, "kept_beyond_outputs": kept - sizes - state - cell}
            transient, kept, _ = extra(lambda: result[0].sum().backward())
            row["backward"] = {"transient": transient, "kept": kept}
            del result
            yield row


def main():
    free, total = torch.cuda.mem_get_info()
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
              "total_bytes": total, "used_by_context_bytes": total - free,
              "recurrent": [], "convolutions": []}
    for part, rows in (("recurrent", measure_recurrent()), ("convolutions", measure_convolutions())):
        try:
            result[part].extend(rows)
        finally:
            with open(sys.argv[1], "w") as file:
                json.dump(result, file)
    print(len(result["recurrent"]), "recurrent,", len(result["convolutions"]), "convolutions")


if __name__ == "__main__":
    main()
