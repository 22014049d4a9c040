"""Contrastive training with a momentum encoder and a queue of keys, as MoCo."""
import copy

import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("set-to-none", "checkpoint-layers", "smaller-batches", "single-tensor-step", "fused-step", "optimizer-in-backward", *changes.FORWARD)
QUEUE, FEATURES = 65536, 128


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.short(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 1, 1)
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.ModuleList(BasicBlock(a, b, 2 if b > a else 1) for a, b in zip((64, *widths), widths))
        self.fc = nn.Linear(512, FEATURES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.fc(x.mean((2, 3))))


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_q = Encoder()
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(FEATURES, QUEUE), dim=0))
        self.place = 0

    @torch.no_grad()
    def keys(self, images):
        for k, q in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
            k.mul_(0.999).add_(q, alpha=0.001)
        return self.encoder_k(images)

    @torch.no_grad()
    def enqueue(self, keys):
        self.queue[:, self.place : self.place + len(keys)] = keys.T
        self.place = (self.place + len(keys)) % QUEUE

    def forward(self, view1, view2):
        q, k = self.encoder_q(view1), self.keys(view2)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        self.enqueue(k)
        return torch.cat([positive, negative], dim=1) / 0.07


model = MoCo().cuda()
CHANGES.checkpoint("encoder_q.blocks.*", model)
optimizer = CHANGES.optimizer(torch.optim.SGD, model, lr=0.03, momentum=0.9)
batch, accumulate = CHANGES.batches(256)
for step in range(3):
    for part in range(accumulate):
        view1, view2 = (torch.randn(batch, 3, 32, 32, device="cuda") for _ in range(2))
        with CHANGES.around_forward():
            logits = model(view1, view2)
            loss = F.cross_entropy(logits, torch.zeros(batch, dtype=torch.long, device="cuda"))
        if part == 0 and "set-to-none" not in CHANGES:
            optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    if "set-to-none" in CHANGES:
        optimizer.zero_grad()
changes.done()
