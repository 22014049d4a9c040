"""Ends at once with the value 1. Else it writes its process id into the pipe `FOLDER/pids`, and waits: `dry_run_waits.py FOLDER VALUE`."""

import os
import sys
import time

import torch

folder, value = sys.argv[1:]
x = torch.zeros(1 << 20, device="cuda")
if value == "1":
    sys.exit(0)
with open(os.path.join(folder, "pids"), "w", encoding="utf-8") as file:
    file.write(f"{os.getpid()}\n")
while True:
    time.sleep(60)
