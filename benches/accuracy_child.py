"""One program of `accuracy` with torch.profiler enabled from its first line; writes each block as PyTorch's memory
profiler sees it.

    accuracy_child.py PROGRAM DEVICE STEPS OUT.json

The file has `blocks`: [address, bytes, created_ns, destroyed_ns or null, [[category or null, from_ns], ...]] in order
of creation. A block's category changes where PyTorch's timeline gives a new version of its tensor another category.
"""

import json
import pathlib
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

functional = torch.nn.functional


def mlp(device, steps, wide):
    """MLP with Adam."""
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(wide, wide), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(wide, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        inputs = torch.randn(wide, wide, device=device)
        labels = torch.zeros(wide, dtype=torch.long, device=device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()


def resnet50(device, steps, wide):
    """ResNet-50 with SGD and momentum."""
    import torchvision

    model = torchvision.models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        images = torch.randn(8, 3, 64, 64).to(device)
        labels = torch.zeros(8, dtype=torch.long).to(device)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Block(torch.nn.Module):
    """A transformer layer as commonly written."""

    def __init__(self, wide, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = torch.nn.LayerNorm(wide), torch.nn.LayerNorm(wide)
        self.qkv, self.out = torch.nn.Linear(wide, 3 * wide), torch.nn.Linear(wide, wide)
        self.up, self.down = torch.nn.Linear(wide, 4 * wide), torch.nn.Linear(4 * wide, wide)
        self.dropout = torch.nn.Dropout(0.1)

    def attention(self, x):
        batch, length, wide = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / (wide // self.heads) ** 0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, wide))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.ln2(x)))))


class Transformer(torch.nn.Module):
    """An embedding of tokens (`vocabulary`) or of patches, layers, and a head."""

    def __init__(self, wide, vocabulary=0, layers=3, length=64, classes=1000, checkpointing=False):
        super().__init__()
        self.front = torch.nn.Embedding(vocabulary, wide) if vocabulary else torch.nn.Linear(192, wide)
        self.places = torch.nn.Parameter(torch.zeros(length, wide))
        self.layers = torch.nn.ModuleList(Block(wide, 4) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(wide), torch.nn.Linear(wide, classes, bias=False)
        self.checkpointing = checkpointing

    def forward(self, inputs):
        x = self.front(inputs) + self.places
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.norm(x))


def tokens(device, vocabulary):
    ids = torch.randint(0, vocabulary, (8, 65)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def patches(device):
    return torch.randn(8, 64, 192).to(device), torch.randint(0, 1000, (8, 64)).to(device)


def loss_of(model, inputs, targets):
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train_clipped(model, steps, batch):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        inputs, targets = batch()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def transformer(device, steps, wide):
    """Transformer over patches with AdamW."""
    train_clipped(Transformer(wide).to(device), steps, lambda: patches(device))


def language(device, steps, wide):
    """Transformer over tokens with AdamW."""
    train_clipped(Transformer(wide, vocabulary=1000).to(device), steps, lambda: tokens(device, 1000))


def accumulation(device, steps, wide):
    """Gradient accumulation over three batches, AdamW."""
    model = Transformer(wide).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        for _ in range(3):
            inputs, targets = patches(device)
            loss = loss_of(model, inputs, targets) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointing(device, steps, wide):
    """Activation checkpointing, AdamW."""
    model = Transformer(wide, checkpointing=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        inputs, targets = patches(device)
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def frozen(device, steps, wide):
    """Frozen layers: the head and the last layer are trained, SGD with momentum."""
    model = Transformer(wide).to(device)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.layers[-1].requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(steps):
        inputs, targets = patches(device)
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


PROGRAMS = {f.__name__: f for f in (mlp, resnet50, transformer, accumulation, checkpointing, frozen, language)}


def blocks(memory, device):
    """Every block of the profiler's timeline, in the timeline's order."""
    from torch.profiler._memory_profiler import Action, TensorKey

    kind = torch.device(device).type
    alive, ended = {}, []

    def category(key, version):
        found = memory._categories.get(key, version) if isinstance(key, TensorKey) else None
        return found.name.lower() if found else None

    unknown = {"blocks": 0, "bytes": 0}
    for when, action, (key, version), size in memory.timeline:
        if key.device.type != kind:
            continue
        if not isinstance(key, TensorKey):
            # No tensor was seen in this block, so the timeline does not even give its address.
            unknown["blocks"] += action is Action.CREATE
            unknown["bytes"] += size if action is Action.CREATE else 0
            continue
        if action in (Action.PREEXISTING, Action.CREATE):
            alive[key] = [key.storage.ptr, size, when, None, [[category(key, version), when]]]
        elif key not in alive:
            continue
        elif action is Action.INCREMENT_VERSION:
            new = category(key, version + 1)
            if new != alive[key][4][-1][0]:
                alive[key][4].append([new, when])
        else:
            block = alive.pop(key)
            block[3] = when
            ended.append(block)
    return ended + list(alive.values()), unknown


def main():
    name, device, steps, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4])
    wide = 256 if name == "mlp" else 128
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.init()
    begin = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True) as profiler:
        PROGRAMS[name](device, steps, wide)
    found, unknown = blocks(profiler._memory_profile(), device)
    out.write_text(json.dumps({"torch": torch.__version__, "begin_ns": begin, "blocks": found, "without_tensor": unknown}))
    raw = out.with_suffix(".raw.json.gz")
    if hasattr(profiler, "export_memory_timeline"):
        profiler.export_memory_timeline(str(raw), "cuda:0" if device == "cuda" else device)


if __name__ == "__main__":
    main()
