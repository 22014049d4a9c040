"""The measured processes of `line-profiler`: takes the name of a function, runs under memtrace, prints the samples as JSON."""

import inspect
import json
import sys
import time

import frame
import turns

MEMLAB = "pytorch_memlab"
KINDS = ["off", "memtrace", MEMLAB]
ROUNDS = 5 if frame.QUICK else 30
BLOCK_S = 0.05
# The passes of the loop before a table is made: pytorch_memlab keeps 10 KiB for each line that ran.
TABLE_PASSES = 20 if frame.QUICK else 200


def python(torch, _, passes):
    """Lines that compute in Python; one of them allocates."""
    total = 0
    for _ in range(passes):
        a = total * 3
        b = a + 7
        c = b % 11
        if c > 5:
            d = c - 5
        else:
            d = c
        e = [a, b, c, d]
        f = sum(e)
        g = f * 2
        h = str(g)
        i = len(h)
        total += i
        block = torch.empty(1024, device="cuda")
        total += block.numel()
    return total


def operations(torch, x, passes):
    """Lines that are tensor operations; each allocates."""
    for _ in range(passes):
        a = x + 1
        b = a * 2
        c = b - x
        d = c.relu()
        e = d @ x
        f = e.t().contiguous()
        g = torch.softmax(f, 1)
        h = g.sum(1, keepdim=True)
        i = g / h
        j = i.sqrt()
    return j


def training(torch, state, passes):
    """Training steps with the layers in a loop."""
    layers, norms, optimizer, batch = state
    for _ in range(passes):
        optimizer.zero_grad()
        x = batch
        for layer, norm in zip(layers, norms):
            y = norm(x)
            y = layer(y)
            y = torch.relu(y)
            x = x + y
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
    return loss


def state_of(function, torch):
    """The modules and tensors of a function, made before it is measured."""
    if function is operations:
        return torch.ones(256, 256, device="cuda")
    if function is training:
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8)).cuda()
        norms = torch.nn.ModuleList(torch.nn.LayerNorm(64) for _ in range(8)).cuda()
        optimizer = torch.optim.SGD([*layers.parameters(), *norms.parameters()], lr=0.01)
        return layers, norms, optimizer, torch.ones(32, 64, device="cuda")
    return None


def of_a_pass(count):
    """How much one pass adds to what `count(passes)` returns."""
    return count(2) - count(1)


def main():
    function = {each.__name__: each for each in (python, operations, training)}[sys.argv[1]]
    import torch

    def prepare(kind):
        state = state_of(function, torch)
        if kind == "memtrace":
            from gpu_memtrace import LineProfiler, is_recording

            assert is_recording(), "memtrace does not record this process"
        elif kind == MEMLAB:
            from pytorch_memlab import LineProfiler
        else:
            LineProfiler = None

        def profiled(passes):
            profiler = LineProfiler and LineProfiler(function, target_gpu=0)
            if profiler:
                profiler.enable()
            start = time.perf_counter()
            function(torch, state, passes)
            seconds = time.perf_counter() - start
            if profiler:
                profiler.disable()
            return profiler, seconds

        def lines(passes):
            ran = 0

            def trace(frame_, event, _):
                nonlocal ran
                if frame_.f_code is function.__code__:
                    ran += event == "line"
                    return trace

            sys.settrace(trace)
            function(torch, state, passes)
            sys.settrace(None)
            return ran

        def allocations(passes):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            function(torch, state, passes)
            return torch.cuda.memory_stats()["allocation.all.allocated"] - before

        def table():
            profiler, _ = profiled(TABLE_PASSES)
            start = time.perf_counter()
            text = str(profiler.display())
            seconds = time.perf_counter() - start
            assert "for _ in range(passes)" in text, text
            return seconds

        profiled(3)
        # A block takes as long for each kind.
        passes = max(1, round(BLOCK_S / (profiled(3)[1] / 3)))
        requests = {
            "lines": lambda: of_a_pass(lines),
            "allocations": lambda: of_a_pass(allocations),
            "table": table,
            "block": lambda: profiled(passes)[1] / passes,
        }
        return lambda request: requests[request]()

    taking = turns.Forked(KINDS, prepare)
    lines, allocations = taking("off", "lines"), taking("off", "allocations")
    samples = turns.rounds(taking, KINDS, ROUNDS, "block")
    tables = {kind: taking(kind, "table") for kind in KINDS[1:]}
    taking.close()
    about = inspect.getdoc(function)
    json.dump({"function": about, "lines": lines, "allocations": allocations, "samples": samples, "table_s": tables,
               "table_passes": TABLE_PASSES}, sys.stdout)


main()
