"""ray_train.py FOLDER: Ray Train with a worker on each of two hosts. Each writes PyTorch's peak into FOLDER/RANK.json."""

import json
import os
import socket
import sys
import time

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config):
    import torch

    rank = ray.train.get_context().get_world_rank()
    assert torch.distributed.get_rank() == rank
    kept = torch.empty((rank + 1) << 22, dtype=torch.uint8, device="cuda")
    torch.distributed.barrier()
    del kept
    with open(os.path.join(config["folder"], f"{rank}.json"), "w") as file:
        json.dump({"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "peak": torch.cuda.max_memory_allocated()}, file)


def connect():
    """Waits until the cluster has both hosts."""
    while True:
        try:
            ray.init(address="10.77.0.1:6379")
            break
        except ConnectionError:
            time.sleep(0.2)
    while ray.cluster_resources().get("GPU", 0) < 2:
        time.sleep(0.2)


connect()
folder = sys.argv[1]
TorchTrainer(
    train,
    train_loop_config={"folder": folder},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True, placement_strategy="STRICT_SPREAD"),
    run_config=RunConfig(name="gpt", storage_path=os.path.join(folder, "results")),
).fit()
