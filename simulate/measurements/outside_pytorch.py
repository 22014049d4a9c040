"""Measures on a GPU what libraries take outside PyTorch at their first use, and the workspaces of cuFFT.

    python outside_pytorch.py

A line is a figure in bytes: by how much the used memory of the device grew beyond what PyTorch reserved, in this order in
one process; or what a transform requested beyond its result. Nothing else may use the device.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

TRANSFORMS = ((1 << 20, ), (1000, 1000), (64, 512, 512), (8, 1009), (8, 30011), (64, 400), (4096, 400), (16, 128, 128, 128), (32, 30000))


def random(*shape):
    return torch.randn(*shape, device="cuda")


def all_reduce():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    dist.all_reduce(random(1000))


FIRST_USES = {
    "kernel": lambda: random(512, 512),
    "cuBLAS, float32": lambda: random(512, 512) @ random(512, 512),
    "cuBLAS, float16": lambda: random(512, 512).half() @ random(512, 512).half(),
    "cuBLASLt": lambda: F.linear(random(512, 512).half(), random(512, 512).half(), random(512).half()),
    "cuDNN, float32": lambda: F.conv2d(random(8, 64, 32, 32), random(64, 64, 3, 3)),
    "cuDNN, float16": lambda: F.conv2d(random(8, 64, 32, 32).half(), random(64, 64, 3, 3).half()),
    "cuFFT": lambda: torch.fft.fft(random(9, 1000)),
    "cuDNN, LSTM": lambda: torch.nn.LSTM(64, 64).cuda()(random(9, 9, 64)),
    "cuSOLVER": lambda: torch.linalg.svd(random(64, 64)),
    "NCCL, one rank": all_reduce,
}


def outside():
    """The used memory of the device beyond what PyTorch reserved, in bytes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def extra(call):
    """The bytes that a call requested at most beyond those of its result."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    stats = torch.cuda.memory_stats()
    del result
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def main():
    torch.cuda.init()
    torch.empty(1, device="cuda")
    print("context:", outside())
    for name, use in FIRST_USES.items():
        before = outside()
        use()
        print(f"{name}:", outside() - before)
    for shape in TRANSFORMS:
        x = random(*shape)
        for name in ("fft", "rfft", "fftn"):
            transform = getattr(torch.fft, name)
            # The first call loads kernels. A plan that is made again requests its workspace again.
            transform(x)
            torch.backends.cuda.cufft_plan_cache.clear()
            print(name, shape, extra(lambda transform=transform, x=x: transform(x)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
