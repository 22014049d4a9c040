"""Reinforcement learning on one GPU: an engine samples, a trainer learns, the engine gets the new weights.

colocated.py [--no-sleep] [--separate]. It prints, for each of the three, the most bytes that PyTorch allocated while it went on.
With --separate, the engine has its own process.
"""

import argparse
import multiprocessing

import torch
from engine import EngineCore, options_of
from torch import nn

STEPS, LAYERS, WIDTH = 3, 4, 2048


def engine_options(sleeps: bool) -> argparse.Namespace:
    words = ["0.45", "--layers", str(LAYERS), "--length", "256", "--batched", "512", "--eager"]
    return options_of(words + (["--cumem"] if sleeps else []))


class Peaks:
    """The highest allocated bytes of each activity, as PyTorch counts them, less the tensors of an engine that sleeps."""

    def __init__(self, name: str, engine=None):
        self.name, self.engine, self.most = name, engine, {}

    def measure(self, activity: str, work) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        asleep = self.engine.bytes_asleep() if self.engine else 0
        self.most[activity] = max(self.most.get(activity, 0), torch.cuda.max_memory_allocated() - asleep)

    def print(self) -> None:
        for activity, peak in self.most.items():
            print(f"{self.name}_{activity}", peak, flush=True)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def train(self) -> None:
        for _ in range(2):
            loss = self.model(torch.randn(4096, WIDTH, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self):
        return [parameter.detach() for parameter in self.model.parameters()]


def rollout(worker) -> None:
    for request in range(4):
        worker.execute_model([([request, request + 1], 24)])
        for _ in range(8):
            worker.execute_model([([request + 1], 1)])


def in_one_process(sleeps: bool) -> None:
    engine = EngineCore(engine_options(sleeps)).worker
    trainer, peaks = Trainer(), Peaks("both", engine)
    for step in range(STEPS):
        peaks.measure("rollout", lambda: rollout(engine))
        if sleeps:
            engine.sleep()
        peaks.measure("train", trainer.train)
        if sleeps:
            engine.wake_up()
        peaks.measure("sync", lambda: engine.update_weights(trainer.weights()))
    print("engine_weights", sum(p.numel() * p.element_size() for p in engine.model_runner.model.parameters()), flush=True)
    print("parameters", sum(p.numel() * p.element_size() for p in trainer.model.parameters()), flush=True)
    peaks.print()


def serve(pipe, sleeps: bool) -> None:
    engine = EngineCore(engine_options(sleeps)).worker
    peaks = Peaks("engine", engine)
    pipe.send("ready")
    for command in iter(pipe.recv, "end"):
        if command == "rollout":
            peaks.measure("rollout", lambda: rollout(engine))
        elif command == "sync":
            peaks.measure("sync", lambda: engine.update_weights(
                [torch.zeros(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]))
        elif sleeps:
            (engine.sleep if command == "sleep" else engine.wake_up)()
        pipe.send("done")
    peaks.print()


def in_two_processes(sleeps: bool) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, sleeps))
    process.start()
    there.close()
    here.recv()
    trainer, peaks = Trainer(), Peaks("trainer")
    for step in range(STEPS):
        for command in ["rollout", "sleep", "train", "wake up", "sync"]:
            if command == "train":
                peaks.measure("train", trainer.train)
            else:
                here.send(command)
                here.recv()
    here.send("end")
    process.join()
    peaks.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-sleep", action="store_true")
    parser.add_argument("--separate", action="store_true")
    options = parser.parse_args()
    (in_two_processes if options.separate else in_one_process)(not options.no_sleep)
