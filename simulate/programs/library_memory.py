"""The device memory of libraries outside PyTorch, with SIMCUDA_LIBRARY_MEMORY, and in NVML."""
import ctypes as C
import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

MIB = 1 << 20


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def outside():
    return used() - torch.cuda.memory_reserved()


def random(*shape):
    return torch.randn(*shape, device="cuda")


def convolution(images=None):
    return F.conv2d(random(1, 3, 9, 9) if images is None else images, random(4, 3, 3, 3))


def backward():
    torch.nn.Linear(64, 64).cuda()(random(4, 64)).sum().backward()


def all_reduce():
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.all_reduce(random(1000))


def raise_stack_limit():
    driver = C.CDLL("libcuda.so.1")
    before, stack = outside(), C.c_size_t()
    assert driver.cuCtxSetLimit(0, C.c_size_t(2048)) == 0
    assert driver.cuCtxGetLimit(C.byref(stack), 0) == 0 and stack.value == 2048
    assert outside() == before, "the next launch takes the memory"
    random(9)


# A handle of cuBLAS allocates 64 MiB and two small blocks, which share a page of 2 MiB with those of the next handle. The backward pass has
# a thread, and so a handle, of its own.
LAZY = {"kernel": (92, lambda: random(9)), "again": (0, lambda: random(9)), "product": (66, lambda: random(9, 9) @ random(9, 9)),
        "backward": (64, backward), "convolution": (10, convolution),
        "its backward pass": (10, lambda: convolution(random(1, 3, 9, 9).requires_grad_()).sum().backward()),
        "transform": (8, lambda: torch.fft.fft(random(8))), "LSTM": (0, lambda: torch.nn.LSTM(8, 8).cuda()(random(9, 9, 8))),
        "solver": (96, lambda: torch.linalg.qr(random(3, 3))), "streams": (70, torch.cuda.Stream), "NCCL": (494, all_reduce), "stack": (264, raise_stack_limit)}
EAGER = {"kernel": (0, lambda: random(9)), "product": (416 + 66, lambda: random(9, 9) @ random(9, 9)),
         "convolution": (204, convolution), "its backward pass": (0, lambda: convolution(random(1, 3, 9, 9).requires_grad_()).sum().backward())}


class Memory(C.Structure):
    _fields_ = [("version", C.c_ulonglong), ("total", C.c_ulonglong), ("reserved", C.c_ulonglong), ("free", C.c_ulonglong),
                ("used", C.c_ulonglong)]


class Process(C.Structure):
    _fields_ = [("pid", C.c_uint), ("bytes", C.c_ulonglong), ("instances", C.c_uint * 2)]


def nvml(path):
    """Total, reserved and free memory as NVML says, and the processes with their names."""
    library, device, memory = C.CDLL(path), C.c_void_p(), Memory()
    assert library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByIndex_v2(0, C.byref(device)) == 0
    assert library.nvmlDeviceGetMemoryInfo_v2(device, C.byref(memory)) == 0
    count = C.c_uint(0)
    assert library.nvmlDeviceGetMPSComputeRunningProcesses_v3(device, C.byref(count), None) == 0 and count.value == 0
    assert library.nvmlDeviceGetGraphicsRunningProcesses_v3(device, C.byref(count), None) == 0 and count.value == 0
    library.nvmlDeviceGetComputeRunningProcesses_v3(device, C.byref(count), None)
    processes, name = (Process * count.value)(), C.create_string_buffer(200)
    assert library.nvmlDeviceGetComputeRunningProcesses_v3(device, C.byref(count), processes) == 0
    found = {}
    for process in processes:
        assert library.nvmlSystemGetProcessName(process.pid, name, len(name)) == 0
        found[process.pid] = (name.value.decode(), process.bytes)
    assert memory.total == memory.reserved + memory.free + memory.used
    assert memory.used == sum(size for _, size in found.values()) + 9_240_576, "a part is attributed to no process"
    pci = C.create_string_buffer(68)
    assert library.nvmlDeviceGetPciInfo_v3(device, pci) == 0 and pci.raw[36:].startswith(b"00000000:01:00.0\0")
    return memory.total, memory.reserved, memory.free, found


def child():
    """A process without a context that loads NVML by its path, as a monitor does."""
    print(nvml(sys.argv[2]))


def full():
    """A process that finds no memory for a context."""
    torch.cuda.init()
    torch.empty(1, device="cuda")


def check_nvml():
    driver = next(line.split()[-1] for line in open("/proc/self/maps") if line.endswith("/libcuda.so.1\n"))
    path = driver.replace("libcuda", "libnvidia-ml")
    total, reserved, free, processes = nvml(path)
    assert (total, reserved) == (8192 * MIB + 600 * MIB, 600 * MIB)
    assert processes[4242] == ("/usr/bin/other", 1 << 30)
    assert processes[os.getpid()] == ("python3", used() - (1 << 30) - 9_240_576), processes
    assert free == torch.cuda.mem_get_info()[0]
    seen = subprocess.run([sys.executable, __file__, "child", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert seen.strip() == str((total, reserved, free, processes)), seen


def main():
    torch.cuda.init()
    eager = os.environ.get("CUDA_MODULE_LOADING") == "EAGER"
    before = used()
    assert before == (1 << 30) + 500 * MIB + eager * 732 * MIB, before
    torch.empty(1, device="cuda")
    for name, (mib, use) in (EAGER if eager else LAZY).items():
        before = outside()
        use()
        assert outside() - before == mib * MIB, (name, (outside() - before) / MIB)
    check_nvml()
    own = torch.empty(torch.cuda.mem_get_info()[0] // (2 * MIB) * (2 * MIB), dtype=torch.uint8, device="cuda")
    failure = subprocess.run([sys.executable, __file__, "full"], stderr=subprocess.PIPE, text=True).stderr
    assert "out of memory" in failure, failure
    del own
    if not eager:
        before = outside()
        dist.destroy_process_group()
        assert before - outside() == 388 * MIB, "the buffers of NCCL, but not its kernels"


if __name__ == "__main__":
    {"child": child, "full": full, "main": main}[(sys.argv[1:] or ["main"])[0]]()
