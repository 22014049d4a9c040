"""The ledger of a killed process contains every call that was served."""
import json
import os
import signal
import subprocess
import sys
import tempfile

if sys.argv[1:] == ["child"]:
    import torch

    blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
    os.kill(os.getpid(), signal.SIGKILL)

path = os.path.join(tempfile.mkdtemp(), "ledger")
status = subprocess.run([sys.executable, __file__, "child"], env={**os.environ, "SIMCUDA_LEDGER": path}).returncode
assert status == -signal.SIGKILL
with open(path) as file:
    lines = [json.loads(line) for line in file]
assert sum(line["api"] == "cudaMalloc" for line in lines) == 10, lines
