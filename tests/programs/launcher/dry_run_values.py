"""Programs whose course or memory depends on values: `dry_run_values.py NAME`. Prints a JSON object."""

import builtins
import ctypes
import json
import math
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


def unknown(count):
    """Numbers that follow from more computation than a dry run does."""
    x = torch.randn(1 << 13, 1 << 13, device=DEVICE)
    return (x @ x).flatten()[:count].clone()


def masks():
    x = unknown(1000)
    mask = x > 0
    return {"masked": x[mask].numel(), "others": x[x <= 0].numel(), "where": len(torch.where(mask)[0]), "unique": x.unique().numel(),
            "both": x[(x > 0) & (x < 1)].numel(), "is_finite": torch.isfinite(x).all().item(), "is_nan": torch.isnan(x).any().item()}


def numbers():
    loss = unknown(4).mean()
    error, rounds = loss.abs(), 0
    while error > 1e-9:
        error, rounds = error / 2, rounds + 1
    distribution = torch.distributions.Bernoulli(probs=torch.rand(4, device=DEVICE))
    # Nothing has written the memory of what is filled when its view is read.
    view = torch.full((), 0.25, dtype=torch.float64, device=DEVICE).unsqueeze(-1)
    assert torch.maximum(view, torch.zeros(1, device=DEVICE)).item() == 0.25
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
    return {"is_customized": getattr(builtins, "is_customized", False), "loss": unknown(4).mean().item(),
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
    index = int(unknown(4).sum().item() * 10)
    return {"found": ["a"][index]}


def value_exit():
    if unknown(4).sum().item() > 0.5:
        sys.exit("the loss is too large")


def value_immediate_exit():
    if unknown(4).sum().item() > 0.5:
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


def solvers():
    """Solvers of linear algebra in used memory. Their status is success, and what they are given is true."""
    a = torch.randn(64, 64, device=DEVICE)
    a = a @ a.T + 64 * torch.eye(64, device=DEVICE)
    b = unknown(64 * 64).view(64, 64)
    names = "inv cholesky lu_factor qr svd eigh pinv slogdet eig matrix_rank svdvals".split()
    solvers = {name: getattr(torch.linalg, name) for name in names}
    solvers["solve"] = solvers["lstsq"] = lambda matrix: torch.linalg.solve(matrix, matrix[..., :2])
    solvers["normal"] = lambda matrix: torch.distributions.MultivariateNormal(torch.zeros(64, device=DEVICE), matrix).rsample((3, ))
    failed = []
    for name, solve in solvers.items():
        for kind, matrix in {"random": a, "unknown": b, "batch": a.expand(8, 64, 64).contiguous()}.items():
            used = [torch.ones(300, device=DEVICE) for _ in range(3)]
            del used
            try:
                solve(matrix)
            except Exception as error:
                failed.append(f"{name} of {kind}: {error}")
    inverse = torch.linalg.inv(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE))
    return {"failed": failed, "inverse": [round(one, 3) for one in inverse.flatten().tolist()]}


def operators():
    """The operators whose results for small tensors differ from those on the CPU."""
    t, w = torch.tensor([2.5, 4.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    names = """ceil floor round trunc sqrt rsqrt exp log sin sigmoid tanh relu erf square frac neg sum mean std var norm sort max argmax unique
        outer diff"""
    functions = {name: getattr(torch, name) for name in names.split()}
    functions["outer"] = lambda t, w: torch.outer(t, t)
    functions.update({
        "matmul": lambda t, w: w @ t, "softmax": lambda t, w: t.softmax(0), "logsumexp": lambda t, w: t.logsumexp(0),
        "linspace": lambda t, w: torch.linspace(0, 1, 3, device=t.device), "stack": lambda t, w: torch.stack([t, t]),
        "power": lambda t, w: t**0.5, "addcmul": lambda t, w: torch.addcmul(t, t, t), "lerp": lambda t, w: torch.lerp(t, t * 2, 0.5),
        "det": lambda t, w: torch.linalg.det(w), "eigvalsh": lambda t, w: torch.linalg.eigvalsh(w @ w.T),
        "cdist": lambda t, w: torch.cdist(w, w * 2), "linear": lambda t, w: torch.nn.functional.linear(t, w),
        "foreach": lambda t, w: torch._foreach_add([t], 1)[0], "half": lambda t, w: t.half().float(), "conv": lambda t, w:
        torch.nn.functional.conv1d(t[None, None], w[:, None]), "layer_norm": lambda t, w: torch.nn.functional.layer_norm(w, (2, )),
    })
    wrong = []
    for name, function in functions.items():
        takes_two = function.__name__ == "<lambda>"
        arguments = (t, w) if takes_two else (t, )
        ours, theirs = function(*[one.to(DEVICE) for one in arguments]), function(*arguments)
        ours, theirs = (one[0] if isinstance(one, tuple) else one for one in (ours, theirs))
        if not torch.allclose(ours.cpu(), theirs, atol=1e-4):
            wrong.append(name)
    return wrong


def optimizers():
    """The history of an optimizer with a line search, and the end of loops that wait for unknown numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1)).to(DEVICE)
    x = torch.randn(256, 2048, device=DEVICE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=8, history_size=10)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[optimizer._params[0]]
    t, dt, steps = torch.zeros((), device=DEVICE), torch.full((), 0.1, device=DEVICE), 0
    while t < 1e9:
        error = unknown(100).norm()
        assert t + dt > t and torch.isfinite(error)
        t, dt, steps = t + dt, dt * (0.9 / error).clamp(0.2, 5), steps + 1
    return {"history": len(state["old_dirs"]), "is_bounded": steps <= 110}


def layouts():
    """The lengths of packed sequences, which are on the host, and the rows of a sparse gradient."""
    packed = torch.nn.utils.rnn.pack_padded_sequence(unknown(3 * 5).view(3, 5, 1), torch.tensor([5, 3, 2]), batch_first=True)
    bags = torch.nn.EmbeddingBag(100, 4, sparse=True, device=DEVICE)
    bags(torch.tensor([7, 7, 9, 3], device=DEVICE), torch.tensor([0, 2], device=DEVICE)).sum().backward()
    return {"packed": packed.batch_sizes.tolist(), "rows": bags.weight.grad.coalesce().indices().tolist()}


def selection():
    """A mask of unknown numbers decides the peak."""
    x = unknown(1 << 20)
    rows = torch.empty(1 << 20, 256, device=DEVICE)
    return {"selected": len(rows[x > 0])}


def branches():
    """Numbers that nothing computes, and what they decide. The comments at the ends of lines are the test's."""
    best, total = 9.0, 0
    for _ in range(3):
        loss = unknown(4).mean()
        print(f"loss {loss.item():.3f} {torch.zeros(2).shape}", loss, file=sys.stderr)
        if math.isnan(loss.item()):
            raise ValueError("NaN")
        assert loss > 0
        value = loss.item()
        if value < best:  # branch
            best = value
        total += value
    error = unknown(4).norm()
    while error > 0.1:  # branch
        error = error / 2
    count = int((unknown(100) > 0).sum())
    rows = torch.empty(count, 10)  # size
    correct = (unknown(100) > 0).sum().item()
    print("accuracy", correct / 100, total, bool(loss > 3), file=sys.stderr)
    score = evaluate()
    if score > best and best is not None:  # branch
        print("saved", file=sys.stderr)
    model = torch.nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(unknown(8).view(2, 4)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # optimizer
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(loss)
    return {"rows": len(rows)}


def evaluate():
    total = 0
    for _ in range(2):
        total += unknown(3).sum().item()
    return total / 2


def storages():
    """A number that another process writes into memory that a parameter had before its `data` was set, as ZeRO does."""
    parameter = torch.nn.Parameter(torch.empty(4, 4, device=DEVICE))
    torch.nn.init.normal_(parameter)
    address = parameter.data_ptr()
    parameter.data = torch.empty(0, device=DEVICE)
    number = torch.tensor(-1, device=DEVICE)
    before = number.item()
    ctypes.c_int64.from_address(number.data_ptr()).value = 7
    return {"is_same": number.data_ptr() == address, "before": before, "after": number.cpu().item()}


def experts():
    """The tokens of each expert of a layer whose router is unknown."""
    chosen = unknown(1024 * 8).view(1024, 8).softmax(-1).topk(2).indices
    return {"tokens": chosen.flatten().bincount(minlength=8).tolist()}


def endless():
    models = [torch.nn.Linear(4, 4).to(DEVICE) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for step in range(10**9):
        for model, optimizer in zip(models, optimizers):
            model(torch.randn(2, 4, device=DEVICE)).sum().backward()
            optimizer.step()
        print(step, flush=True)


print(json.dumps(globals()[sys.argv[1]]()))
