"""The changes that suggestions of the report ask for, as the programs of this folder make them.

    program.py [--change RULE]... [--action TEXT] [--code CODE] [--limit BYTES] [--list]

RULE is the id of a suggestion's rule. TEXT is the suggestion as the report prints it. What it names is what the program
changes, for example `blocks.* (12 of Block)`; without TEXT the program chooses. CODE is the suggestion's code, which checkpoints in place of the
program's own. BYTES is what PyTorch may reserve. A program that cannot make a change ends with
status 3 and says why. The last line of every program is `torch.cuda.max_memory_allocated()`.
"""

import argparse
import contextlib
import fnmatch
import functools
import re
import sys

import torch
from torch.utils.checkpoint import checkpoint

# The change that each rule's suggestion stands for. A rule that gets another id needs another line here, and nothing else.
CHANGE_OF_RULE = {
    "adapters": "adapters",
    "autocast": "autocast",
    "backward-each": "backward-each",
    "bfloat16-model": "bfloat16-model",
    "checkpoint-layers": "checkpoint-layers",
    "checkpoint-or-no-grad": "checkpoint-layers",
    "build-on-meta": "build-on-meta",
    "data-to-cpu": "data-to-cpu",
    "chunked-cross-entropy": "chunked-cross-entropy",
    "chunked-loss": "chunked-cross-entropy",
    "clear-gradients": "set-to-none",
    "eight-bit-moments": "eight-bit-moments",
    "final-data-type": "final-data-type",
    "freeze-unused": "freeze-unused",
    "fused-optimizer": "fused-step",
    "fused-step": "fused-step",
    "gradients-in-buckets": "gradients-in-buckets",
    "half-the-batch": "half-the-batch",
    "load-to-cpu": "load-to-cpu",
    "loss-in-replicas": "loss-in-replicas",
    "more-micro-batches": "smaller-batches",
    "no-autocast-cache": "no-autocast-cache",
    "no-grad": "no-grad",
    "no-kv-cache": "no-kv-cache",
    "offload-activations": "offload-activations",
    "optimizer-in-backward": "optimizer-in-backward",
    "results-to-cpu": "predictions-to-cpu",
    "scaled-dot-product-attention": "scaled-dot-product-attention",
    "set-to-none": "set-to-none",
    "share-buffers": "share-buffers",
    "single-tensor-step": "single-tensor-step",
    "smaller-batches": "smaller-batches",
    "smaller-evaluation-batch": "smaller-evaluation-batch",
    "smaller-evaluation-batches": "smaller-evaluation-batch",
}
# The changes that `CHANGES.optimizer` makes to the optimizers of torch.optim.
STEP = ("single-tensor-step", "fused-step", "optimizer-in-backward")
ADAM = (*STEP, "eight-bit-moments")
SGD = (*STEP, "eight-bit-moments")
# The changes that `CHANGES.around_forward` makes.
FORWARD = ("offload-activations", "autocast")
# The rank of adapters.
RANK = 8
# The number of chunks of a chunked cross-entropy, if the suggestion has no number.
CHUNKS = 8
# The status of a program that cannot make a change.
CANNOT = 3


def cannot(why):
    print(f"cannot: {why}", file=sys.stderr)
    sys.exit(CANNOT)


class EightBit(torch.optim.Optimizer):
    """Allocates what bitsandbytes' 8-bit optimizers allocate: per moment one byte an element and a float32 per 256
    elements, float32 moments for tensors of fewer than 4096 elements. Its kernel needs no temporaries, as the update
    here."""

    moments = ("state1",)

    def __init__(self, params, lr=1e-3, **_):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    small = p.numel() < 4096
                    for name in self.moments:
                        state[name] = torch.zeros_like(p, dtype=torch.float32 if small else torch.uint8)
                        if not small:
                            state[f"absmax_{name}"] = torch.zeros(-(-p.numel() // 256), device=p.device)
                p.add_(p.grad, alpha=-group["lr"])


class Adam8bit(EightBit):
    """`bitsandbytes.optim.Adam8bit` and `AdamW8bit`."""

    moments = ("state1", "state2")


class SGD8bit(EightBit):
    """`bitsandbytes.optim.SGD8bit`."""


class InBackward:
    """One optimizer a parameter. Each steps as soon as backward has accumulated its gradient."""

    def __init__(self, make, params):
        self.optimizers = {p: make([p]) for p in params}
        for p in self.optimizers:
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


class Adapted(torch.nn.Module):
    """A frozen linear layer with a product of two small matrices beside it, as LoRA has them."""

    def __init__(self, base):
        super().__init__()
        self.base, like = base, {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = torch.nn.Linear(base.in_features, RANK, bias=False, **like)
        self.up = torch.nn.Linear(RANK, base.out_features, bias=False, **like)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * (1 / RANK)


class Changes:
    """The changes that were asked for: `"no-grad" in CHANGES`."""

    def __init__(self, asked, action, code):
        self.asked, self.action, self.code = set(asked), action, code

    def __contains__(self, change):
        return change in self.asked

    @property
    def dtype(self):
        """The type of the model and of its inputs."""
        return torch.bfloat16 if "bfloat16-model" in self else torch.float32

    def batches(self, size, accumulate=1):
        """The size of a micro-batch and how many are accumulated."""
        if "smaller-batches" in self:
            return size // 2, accumulate * 2
        return (size // 2 if "half-the-batch" in self else size), accumulate

    def around_forward(self):
        stack = contextlib.ExitStack()
        if "offload-activations" in self:
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        if "autocast" in self:
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        return stack

    def optimizer(self, kind, model, **options):
        """`kind(model.parameters(), **options)`, changed as asked."""
        if "single-tensor-step" in self:
            options["foreach"] = False
        if "fused-step" in self:
            options["fused"] = True
        if "eight-bit-moments" in self:
            kind = SGD8bit if kind is torch.optim.SGD else Adam8bit
        params = [p for p in model.parameters() if p.requires_grad]
        if "optimizer-in-backward" in self:
            return InBackward(functools.partial(kind, **options), params)
        return kind(params, **options)

    def checkpoint(self, pattern, *models, **named_models):
        """Checkpoints the modules that the suggestion names; those of `pattern` if it names none. `named_models`: models
        by the name that the report has for them."""
        if "checkpoint-layers" not in self:
            return
        if self.code:
            for model in [*models, *named_models.values()]:
                exec(self.code, {"model": model})
            return
        # The path pattern, the number of modules and their class.
        named = re.findall(r"(?:\bof|\band|,) (\S+) \((?:(\d+) of )?(\w+)\)", self.action)
        named += [("", count, name) for count, name in re.findall(r"\ball (\d+) (\w+) modules", self.action)]
        if self.action and not named:
            cannot(f"the suggestion names no modules: {self.action}")
        for pattern, count, name in named or [(pattern, None, None)]:
            found = [
                module
                for prefix, model in [("", model) for model in models] + list(named_models.items())
                for path, module in model.named_modules(prefix=prefix)
                if (not pattern or matches(path, pattern)) and name in (None, type(module).__name__)
            ]
            # At an error not all of them have run.
            if not found or int(count or len(found)) > len(found):
                cannot(f"{len(found)} modules match {pattern}, not {count}: {self.action}")
            for module in found:
                module.forward = checkpointed(module.forward)

    def adapt(self, model):
        """Freezes the model and gives each linear layer an adapter."""
        if "adapters" not in self:
            return
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, Adapted(child))

    def cross_entropy(self, head, hidden, targets):
        """The mean cross-entropy of `head(hidden)`, whole or in chunks."""
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        if "chunked-cross-entropy" not in self:
            return torch.nn.functional.cross_entropy(head(hidden), targets)
        number = re.search(r"\b(\d+) chunks", self.action)
        chunks = int(number[1]) if number else CHUNKS
        total = 0
        for part, ids in zip(hidden.chunk(chunks), targets.chunk(chunks)):
            total = total + checkpoint(chunk_of_cross_entropy, head, part, ids, use_reentrant=False)
        return total / len(targets)


def matches(path, pattern):
    """Whether a module's path has the pattern, with or without the `module.` of DistributedDataParallel."""
    return any(
        fnmatch.fnmatchcase(path, pattern) and path.count(".") == pattern.count(".")
        for path in (path, path.removeprefix("module."))
    )


def chunk_of_cross_entropy(head, hidden, targets):
    return torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")


def checkpointed(forward):
    @functools.wraps(forward)
    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def parse(*possible):
    """Reads the command line of a program that can make the changes `possible`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--change", action="append", default=[], metavar="RULE")
    parser.add_argument("--action", default="", metavar="TEXT")
    parser.add_argument("--code", default="", metavar="CODE")
    parser.add_argument("--limit", type=int, metavar="BYTES")
    parser.add_argument("--list", action="store_true", help="print the changes that the program can make")
    options = parser.parse_args()
    if options.list:
        print("\n".join(sorted(possible)))
        sys.exit(0)
    if "smaller-batches" in possible:
        possible = (*possible, "half-the-batch")
    asked = [CHANGE_OF_RULE.get(rule, rule) for rule in options.change]
    for change in asked:
        if change not in possible:
            cannot(f"{change}: the program has no such variant")
    if options.limit:
        torch.cuda.set_per_process_memory_fraction(options.limit / torch.cuda.mem_get_info()[1])
    return Changes(asked, options.action, options.code)


def done():
    torch.cuda.synchronize()
    print(torch.cuda.max_memory_allocated())
