"""Memory that PyTorch's snapshot never shows: cuBLAS's workspace, NCCL's buffers (one rank). Prints NVML's value."""

import json
import os

import torch
import torch.distributed as dist

a = torch.ones(1024, 1024, device="cuda")
(a @ a).sum().item()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl")
dist.all_reduce(a)
torch.cuda.synchronize()
used = None
try:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
except Exception as error:
    used = str(error)
free, total = torch.cuda.mem_get_info()
print(json.dumps({"nvml_used": used, "used": total - free, "reserved": torch.cuda.memory_reserved()}), flush=True)
dist.destroy_process_group()
