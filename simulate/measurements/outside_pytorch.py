"""Measures on a GPU what a process takes outside PyTorch at the first use of each library.

    python outside_pytorch.py OUT.jsonl [SEQUENCE]

Each sequence runs in a process of its own, forked before CUDA starts, and writes one JSON object. A row has the name of a step
and by how much the used memory of the device exceeds what PyTorch reserved after it, in bytes; a third figure is what the step
returned. With SEQUENCE only that one runs, in this process, so that a tracer can see its calls. Nothing else may use the device.
"""

import ctypes
import json
import os
import sys
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
STACK, PRINTF, HEAP = 0, 1, 2
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}


def random(*shape, **options):
    return torch.empty(*shape, device="cuda", **options)


def eye():
    return torch.eye(64, device="cuda")


def outside():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def in_thread(call):
    def run():
        thread = threading.Thread(target=lambda: (call(), torch.cuda.synchronize()))
        thread.start()
        thread.join()
    return run


def product(data_type):
    return lambda: random(512, 512, dtype=data_type) @ random(512, 512, dtype=data_type)


def convolution(data_type):
    return lambda: F.conv2d(random(8, 64, 32, 32, dtype=data_type), random(64, 64, 3, 3, dtype=data_type))


def trained(module, *shape, data_type=F32):
    return lambda: module().cuda().to(data_type)(random(*shape, dtype=data_type)).sum().backward()


def attention(data_type):
    def run():
        q = random(2, 4, 128, 64, dtype=data_type).requires_grad_()
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    return run


def set_limit(kind, size):
    def run():
        status = ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(kind, ctypes.c_size_t(size))
        random(10).add_(1)
        return status
    return run


def second_context():
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    status = driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return status


def start_nccl():
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 400))
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))


def all_reduce():
    import torch.distributed as dist

    dist.all_reduce(random(1000))


def graph():
    captured, x = torch.cuda.CUDAGraph(), random(1000)
    with torch.cuda.graph(captured):
        x.add_(1)
    captured.replay()


def adamw():
    parameter = nn.Parameter(random(1000))
    parameter.grad = random(1000)
    torch.optim.AdamW([parameter]).step()


ADD = ("add_", lambda: random(512, 512).add_(1))
LINEAR, CONVOLUTION = lambda: nn.Linear(512, 512), lambda: nn.Conv2d(64, 64, 3)
OPERATORS = {
    "zero_": lambda: random(512, 512).zero_(), "fill_": lambda: random(512).fill_(2), "add_": ADD[1], "half": lambda: random(512, 512).half(),
    "randn": lambda: torch.randn(512, 512, device="cuda"), "arange": lambda: torch.arange(99, device="cuda"), "relu": lambda: F.relu(random(512)),
    "sum": lambda: random(512, 512).sum(), "softmax": lambda: random(64, 512).softmax(-1), "layer_norm": lambda: F.layer_norm(random(64, 512), (512,)),
    "gelu": lambda: F.gelu(random(512)), "cat": lambda: torch.cat([random(99), random(99)]), "sort": lambda: random(5000).sort(),
    "cumsum": lambda: random(5000).cumsum(0), "copy": lambda: random(64, 64).t().contiguous(), "adamw": adamw,
    "max_pool": lambda: F.max_pool2d(random(2, 3, 32, 32), 2), "mm": product(F32), "conv": convolution(F32), "fft": lambda: torch.fft.fft(random(9, 1000)),
    "attention": attention(B16),
}
SEQUENCES = {
    "library order": [
        ("first kernel: randn", OPERATORS["randn"]), ADD, ("half", OPERATORS["half"]), ("mm fp32", product(F32)), ("mm fp16", product(F16)),
        ("mm bf16", product(B16)), ("mm fp64", product(F64)), ("thread mm", in_thread(product(F32))), ("conv fp32", convolution(F32)),
        ("conv fp16", convolution(F16)), ("conv bf16", convolution(B16)), ("fft", OPERATORS["fft"]), ("fft odd", lambda: torch.fft.fft(random(8, 1009))),
        ("lstm", lambda: nn.LSTM(64, 64).cuda()(random(9, 9, 64))), ("svd", lambda: torch.linalg.svd(eye())), ("cholesky", lambda: torch.linalg.cholesky(eye())),
        ("eigh", lambda: torch.linalg.eigh(eye())), ("sparse", lambda: eye().to_sparse_csr() @ random(64, 8)), ("graph", graph), ("nccl init", start_nccl),
        ("all_reduce", all_reduce), ("stack 4 KiB", set_limit(STACK, 4096)), ("stack 16 KiB", set_limit(STACK, 16384)),
        ("heap 64 MiB", set_limit(HEAP, 64 << 20)), ("printf 16 MiB", set_limit(PRINTF, 16 << 20)), ("other context", second_context)],
    "train fp32": [ADD, ("linear", trained(LINEAR, 64, 512)), ("conv", trained(CONVOLUTION, 8, 64, 32, 32)), ("adamw", adamw), ("attention", attention(F32))],
    "train bf16": [ADD, ("linear", trained(LINEAR, 64, 512, data_type=B16)), ("conv", trained(CONVOLUTION, 8, 64, 32, 32, data_type=B16)), ("adamw", adamw),
                   ("attention", attention(B16))],
    "conv only": [("conv", trained(CONVOLUTION, 8, 64, 32, 32)), ("conv half", trained(CONVOLUTION, 8, 64, 32, 32, data_type=F16))],
    "solver first": [("svd", lambda: torch.linalg.svd(random(64, 64).zero_()))],
    "nccl first": [("nccl init", start_nccl), ("all_reduce", all_reduce)],
    "lstm first": [("lstm", lambda: nn.LSTM(64, 64).cuda()(random(9, 9, 64)))],
    "streams": [("stream", lambda: [torch.cuda.Stream() for _ in range(32)]), ("graph", graph)],
    "handles": [("mm", product(F32)), *[(f"thread {n}", in_thread(product(F32))) for n in range(3)]],
}
SEQUENCES |= {f"only {name}": [(name, call), ADD] for name, call in OPERATORS.items()}


def measured(steps):
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    rows = [["context", total - free]]
    random(1)
    rows.append(["first allocation", outside()])
    for name, call in steps:
        returned = call()
        rows.append([name, outside(), *([returned] if isinstance(returned, int) else [])])
    return rows


def write(path, name, variables):
    os.environ.update(variables)
    with open(path, "a") as file:
        file.write(json.dumps({"name": name, "env": variables, "rows": measured(SEQUENCES[name])}) + "\n")


def main():
    path, *only = sys.argv[1:]
    if only:
        write(path, only[0], {})
        return
    for name, variables in [*((name, {}) for name in SEQUENCES), ("library order", EAGER), ("handles", EAGER)]:
        if not (pid := os.fork()):
            write(path, name, variables)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            print("failed:", name, file=sys.stderr)


if __name__ == "__main__":
    main()
