"""ResNet-50, trained as in PyTorch's posts "Understanding GPU Memory": an ordinary training script that does not use memtrace.

Each option adds one issue that the posts and PyTorch's forum are about.
"""

import argparse
import gc

import torch
import torch.nn.functional as F
import torchvision

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--no-zero-grad", action="store_true", help="leave optimizer.zero_grad() out")
parser.add_argument("--validate", action="store_true", help="validate after each step, without torch.no_grad()")
parser.add_argument("--cycle", action="store_true", help="make each batch part of a reference cycle")
options = parser.parse_args()


class Batch:
    def __init__(self):
        self.images = torch.zeros(32, 3, 224, 224).cuda()
        self.labels = torch.zeros(32, dtype=torch.long).cuda()
        if options.cycle:
            self.on_error = self.describe  # A bound method refers to its object.

    def describe(self):
        return f"{len(self.labels)} images"


def compute_loss(model, batch):
    return F.cross_entropy(model(batch.images), batch.labels)


def main():
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    validation_losses = []
    gc.disable()  # As large trainings do: the collector runs every fourth step, on all ranks at once.
    for step in range(5):
        loss = compute_loss(model, Batch())
        loss.backward()
        optimizer.step()
        if not options.no_zero_grad:
            optimizer.zero_grad()
        if options.validate:
            validation_losses.append(compute_loss(model, Batch()))
        print(f"step {step}: {torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated after the step")
        if step % 4 == 3:
            gc.collect()


main()
