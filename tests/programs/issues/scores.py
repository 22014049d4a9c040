# issue: stray-context
# env: SIMCUDA_DEVICES=2 OMP_NUM_THREADS=1
"""A metric that names its device: every rank adds its scores up on cuda:0."""

import os
import subprocess
import sys

import torch


class Score:
    def __init__(self):
        self.total = torch.zeros(1 << 20, device="cuda:0")  # issue here

    def update(self, outputs):
        self.total += outputs.detach().sum().to("cuda:0")


def work(device):
    net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 16)).to(device)
    opt = torch.optim.Adam(net.parameters())
    score = Score()
    for _ in range(4):
        out = net(torch.zeros(128, 512, device=device))
        out.mean().backward()
        score.update(out)
        opt.step()
        opt.zero_grad()


if "RANK" in os.environ:
    work(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
else:
    jobs = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        jobs.append(subprocess.Popen([sys.executable, __file__], env={**os.environ, **place}))
    sys.exit(max(job.wait() for job in jobs))
