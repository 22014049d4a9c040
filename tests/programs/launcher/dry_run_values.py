"""Programs whose course or memory depends on values: `dry_run_values.py NAME`. Prints a JSON object."""

import builtins
import json
import os
import resource
import sys

import torch

DEVICE = "cuda"


def integers():
    x = torch.arange(10, device=DEVICE)
    y = torch.where(x % 3 == 0, x, -x)
    y[y < -7] = 0
    return {
        "where": y.tolist(),
        "nonzero": (x > 6).nonzero().flatten().tolist(),
        "unique": [one.tolist() for one in torch.unique(x % 3, return_counts=True)],
        "repeated": torch.repeat_interleave(torch.tensor([1, 0, 2], device=DEVICE)).tolist(),
        "bincount": torch.bincount(x // 4).tolist(),
        "sorted": torch.tensor([3, 1, 2]).to(DEVICE).sort().values.tolist(),
        "one_hot": torch.nn.functional.one_hot(x[:3]).tolist(),
        "coalesced": torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.ones(3), (4, )).to(DEVICE).coalesce().indices().tolist(),
    }


def masks():
    x = torch.randn(1000, device=DEVICE)
    mask = x > 0
    return {"masked": x[mask].numel(), "others": x[x <= 0].numel(), "where": len(torch.where(mask)[0]), "unique": x.unique().numel(),
            "is_finite": torch.isfinite(x).all().item(), "is_nan": torch.isnan(x).any().item()}


def numbers():
    loss = torch.randn(4, device=DEVICE).mean()
    error, rounds = loss.abs(), 0
    while error > 1e-9:
        error, rounds = error / 2, rounds + 1
    distribution = torch.distributions.Bernoulli(probs=torch.rand(4, device=DEVICE))
    return {"loss": loss.item(), "list": loss.view(1).tolist(), "copied": torch.tensor([2.5, 0.5]).to(DEVICE).tolist(),
            "filled": torch.full((), 7.5, device=DEVICE).item(), "rounds": rounds, "sampled": list(distribution.sample().shape)}


def scaler():
    model = torch.nn.Linear(8, 8).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, steps = torch.amp.GradScaler(DEVICE), 0
    own_step = optimizer.step

    def counted(*arguments, **options):
        nonlocal steps
        steps += 1
        return own_step(*arguments, **options)

    optimizer.step = counted
    for _ in range(3):
        scaler.scale(model(torch.randn(2, 8, device=DEVICE)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"steps": steps, "scale": scaler.get_scale()}


def sampling():
    """Ends when all sequences have ended, or at 64 tokens."""
    table = torch.nn.Linear(16, 1000).to(DEVICE)
    tokens, is_running = torch.ones(4, 1, dtype=torch.long, device=DEVICE), torch.ones(4, dtype=torch.long, device=DEVICE)
    while tokens.size(1) < 64 and is_running.max() > 0:
        probabilities = table(torch.randn(4, 16, device=DEVICE)).softmax(-1)
        chosen = torch.multinomial(probabilities, 1) * is_running[:, None]
        tokens = torch.cat([tokens, chosen], dim=1)
        is_running = is_running.mul((chosen[:, 0] != 2).long())
    return {"length": tokens.size(1), "is_valid": bool(((tokens >= 0) & (tokens < 1000)).all())}


def routing():
    chosen = torch.randn(96, 8, device=DEVICE).softmax(-1).topk(2).indices
    return {"tokens": [len(torch.where(chosen == expert)[0]) for expert in range(8)]}


def suppression():
    from torchvision.ops import nms
    boxes = torch.rand(100, 4, device=DEVICE)
    kept = nms(boxes, boxes[:, 0], 0.5)
    return {"kept": boxes[kept].shape[0], "highest": kept.max().item()}


def environment():
    """The effects that the program can see of the modules that a dry run loads."""
    return {"is_customized": getattr(builtins, "is_customized", False), "loss": torch.randn(4, device=DEVICE).mean().item(),
            "foreign_paths": [path for path in sys.path if "simulated" in path]}


def compilers():
    """Where compiled code goes, and whether inductor stops its workers and forks new ones later."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
    from torch.utils.cpp_extension import _get_build_directory
    folders = [cache_dir(), triton_cache_dir(0), _get_build_directory("extension", False), os.environ["CUDA_CACHE_PATH"]]
    return {"folders": folders, "forks_workers_again": config.quiesce_async_compile_pool}


def memory():
    """The host memory in MiB that 70 GB on the device take."""
    before = peak()
    with torch.device(DEVICE):
        model = torch.nn.Linear(100_000, 100_000, bias=False)
    empty = torch.empty(15 << 30, dtype=torch.uint8, device=DEVICE)
    zeros = torch.zeros(15 << 30, dtype=torch.uint8, device=DEVICE)
    zeros.zero_(), empty.fill_(7), (zeros > 0)
    return {"device": torch.cuda.memory_allocated(), "host": peak() - before, "parameters": sum(one.numel() for one in model.parameters())}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def value_error():
    index = int(torch.randn(4, device=DEVICE).sum().item() * 10)
    return {"found": ["a"][index]}


def value_exit():
    if torch.randn(4, device=DEVICE).sum().item() > 0.5:
        sys.exit("the loss is too large")


def value_immediate_exit():
    if torch.randn(4, device=DEVICE).sum().item() > 0.5:
        os._exit(3)


def early_exit():
    torch.randn(4, device=DEVICE)
    sys.exit(3)


def out_of_memory_exit():
    torch.randn(4, device=DEVICE).sum().item()
    try:
        torch.empty(1 << 50, device=DEVICE)
    except torch.cuda.OutOfMemoryError:
        print("too large for this GPU: CUDA out of memory", file=sys.stderr)
    sys.exit(3)


def early_error():
    torch.randn(4, device=DEVICE)
    raise ValueError("before any value")


def out_of_memory():
    torch.randn(4, device=DEVICE).sum().item()
    torch.empty(1 << 50, device=DEVICE)


def endless():
    models = [torch.nn.Linear(4, 4).to(DEVICE) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for step in range(10**9):
        for model, optimizer in zip(models, optimizers):
            model(torch.randn(2, 4, device=DEVICE)).sum().backward()
            optimizer.step()
        print(step, flush=True)


print(json.dumps(globals()[sys.argv[1]]()))
