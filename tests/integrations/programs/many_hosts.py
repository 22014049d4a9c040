"""many_hosts.py HOW FOLDER [OPTION...]: a rank of a job on several hosts, as the frameworks start it.

HOW is plain, lightning, accelerate or deepspeed. Each rank writes PyTorch's own peak into FOLDER/RANK.json. Kernels do not run over the
simulated CUDA, so no result is read.
"""

import json
import os
import socket
import sys

import torch


def plain():
    """No framework and no group: Slurm's variables name the rank."""
    rank = int(os.environ["SLURM_PROCID"])
    torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]))
    kept = torch.empty((rank + 1) << 22, dtype=torch.uint8, device="cuda")
    del kept
    return rank


def lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = Trainer(num_nodes=2, devices=2, accelerator="gpu", strategy=strategy, max_epochs=1, **options)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(256, 256), batch_size=64))
    return trainer.global_rank


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = torch.nn.Linear(512, 512)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.empty(64, 512, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.process_index


def deepspeed():
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

    more = ["--max_steps", "2", "--output_dir", os.path.join(folder, "output"), "--report_to", "none", "--save_strategy", "no"]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*sys.argv[3:], *more])
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64))
    tokens = [{"input_ids": torch.arange(64), "labels": torch.arange(64)} for _ in range(64)]
    Trainer(model=model, args=arguments, train_dataset=tokens).train()
    return torch.distributed.get_rank()


how, folder = sys.argv[1:3]
rank = {"plain": plain, "lightning": lightning, "accelerate": accelerate, "deepspeed": deepspeed}[how]()
with open(os.path.join(folder, f"{rank}.json"), "w") as file:
    peak = torch.cuda.max_memory_allocated()
    json.dump({"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "peaks": {"any": peak}}, file)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
