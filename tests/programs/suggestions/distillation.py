"""Distils a frozen tagger of words into a narrower, pretrained one, by the divergence of their softened logits."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "adapters", *changes.ADAM,
                        *changes.FORWARD)
WORDS, TAGS, LENGTH, TEMPERATURE = 20000, 2000, 256, 2.0


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 2 * LENGTH), nn.GELU(), nn.Linear(2 * LENGTH, LENGTH))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Tagger(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.mixers = nn.Sequential(*[Mixer(width) for _ in range(depth)])
        self.tags = nn.Linear(width, TAGS)

    def forward(self, ids):
        return self.tags(self.mixers(self.words(ids)))


class Distiller:
    def __init__(self, teacher, student):
        self.teacher, self.student = teacher.eval().requires_grad_(False), student
        CHANGES.adapt(student)
        CHANGES.checkpoint("mixers.*", student)
        self.optimizer = CHANGES.optimizer(torch.optim.AdamW, student, lr=5e-4)
        self.batch, self.accumulate = CHANGES.batches(16)

    def loss(self, ids, tags):
        with torch.no_grad():
            targets = F.softmax(self.teacher(ids) / TEMPERATURE, dim=-1)
        logits = self.student(ids)
        soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=-1), targets, reduction="sum") / tags.numel()
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten()) + TEMPERATURE**2 * soft

    def fit(self, steps):
        for _ in range(steps):
            for _ in range(self.accumulate):
                ids = torch.zeros(self.batch, LENGTH, dtype=torch.long, device="cuda")
                with CHANGES.around_forward():
                    loss = self.loss(ids, torch.zeros_like(ids)) / self.accumulate
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


teacher, student = (Tagger(*size).to("cuda", CHANGES.dtype) for size in ((768, 12), (320, 6)))
Distiller(teacher, student).fit(steps=5)
changes.done()
