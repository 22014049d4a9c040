"""A thread for each request, each with its own cuBLAS handle and stream."""
# issue: cublas-workspaces
import os
import threading

import torch

os.environ["TORCH_CUBLAS_WORKSPACE_CACHE"] = "1"  # PyTorch 2.15 keeps no workspace otherwise.


class Worker(threading.Thread):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.stream = weight, torch.cuda.Stream()

    def run(self):
        with torch.cuda.stream(self.stream), torch.no_grad():
            x = torch.randn(256, 768, device="cuda")
            self.result = self.score(x).sum()
            self.stream.synchronize()

    def score(self, x):
        return x @ self.weight  # issue here


weight = torch.randn(768, 768, device="cuda")
for wave in range(5):
    workers = [Worker(weight) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
