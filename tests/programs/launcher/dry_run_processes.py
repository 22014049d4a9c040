"""A second process on the same GPU. Prints the free memory, in bytes, before it started, while it holds 1 GiB, and after it was killed."""

import json
import subprocess
import sys

import torch

HOLD = "import torch; block = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print(flush=True); input()"


def free():
    return torch.cuda.mem_get_info()[0]


torch.cuda.init()
free_bytes = [free()]
process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
free_bytes.append(free())
process.kill()
process.wait()
free_bytes.append(free())
print(json.dumps({"free_bytes": free_bytes}))
