"""Named ranges of every kind. Writes its own list of all starts and ends, by thread, as JSON to the file that
MEMTRACE_TEST_TRUTH names."""

import json
import os
import sys
import threading

import torch
from torch.profiler import record_function

truth = {"main": [], "other": []}
here = threading.local()


def say(kind, stage, name):
    truth[getattr(here, "name", "main")].append([kind, stage, name])


class named:
    """A range of record_function that is added to the list."""

    def __init__(self, name, arguments=None):
        self.name, self.range = name, record_function(name, arguments)

    def __enter__(self):
        say("record_function", "START", self.name)
        self.range.__enter__()

    def __exit__(self, *error):
        self.range.__exit__(*error)
        say("record_function", "END", self.name)


def own(name, work):
    """Adds a range that PyTorch marks by itself."""
    say("record_function", "START", name)
    result = work()
    say("record_function", "END", name)
    return result


def train():
    device = "cuda"
    model = torch.nn.Linear(64, 32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 64))
    loader = iter(torch.utils.data.DataLoader(data, batch_size=4))
    name = f"enumerate(DataLoader)#{type(loader).__name__}.__next__"
    for step in range(3):
        with named(f"step_{step}"):
            (x,) = own(name, lambda: next(loader))
            with named("forward", "arguments"):
                loss = model(x.to(device)).sum()
            with named("backward"):
                loss.backward()
            own("Optimizer.step#SGD.step", optimizer.step)
            own("Optimizer.zero_grad#SGD.zero_grad", optimizer.zero_grad)


def odd():
    with named(""):
        pass
    with named("Größe \u2192 \U0001f600"):
        torch.empty(512, device="cuda")
    try:
        with named("raises"):
            raise ValueError
    except ValueError:
        pass
    # Overlapping ranges that do not nest.
    first, second = named("first"), named("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    # A name of 1024 characters.
    with named("x" * 1024):
        pass
    # A range that libraries mark in C++.
    with torch.autograd.profiler.record_function("ends in a function"):
        say("record_function", "START", "ends in a function")
        torch.zeros(1)
    say("record_function", "END", "ends in a function")


def nvtx():
    from torch.cuda import nvtx

    say("nvtx", "START", "outer")
    outer = nvtx.range_push("outer")
    say("nvtx", "START", "inner")
    nvtx.range_push("inner")
    torch.empty(1024, device="cuda")
    say("nvtx", "START", "a mark")
    say("nvtx", "END", "a mark")
    nvtx.mark("a mark")
    say("nvtx", "START", "no nesting")
    number = nvtx.range_start("no nesting")
    say("nvtx", "END", "inner")
    nvtx.range_pop()
    say("nvtx", "END", "no nesting")
    nvtx.range_end(number)
    say("nvtx", "END", "outer")
    # The value that NVTX returns without a tool.
    assert outer == nvtx.range_pop() == -2, outer


def package():
    """The nvtx package: domains, registered strings."""
    import nvtx

    for domain in None, "loader":
        prefix = f"{domain}:" if domain else ""
        for message in "load", "load", "decode":
            say("nvtx", "START", prefix + message)
            with nvtx.annotate(message, domain=domain):
                torch.empty(256, device="cuda")
            say("nvtx", "END", prefix + message)
        say("nvtx", "START", prefix + "here")
        say("nvtx", "END", prefix + "here")
        nvtx.mark("here", domain=domain)
        say("nvtx", "START", prefix + "far")
        far = nvtx.start_range("far", domain=domain)
        say("nvtx", "END", prefix + "far")
        nvtx.end_range(far)


def library(path):
    """The functions that C programs call, in NVTX as a library (before version 3)."""
    import ctypes

    class Attributes(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_uint16),
            ("size", ctypes.c_uint16),
            ("category", ctypes.c_uint32),
            ("color_type", ctypes.c_int32),
            ("color", ctypes.c_uint32),
            ("payload_type", ctypes.c_int32),
            ("reserved", ctypes.c_int32),
            ("payload", ctypes.c_uint64),
            ("message_type", ctypes.c_int32),
            ("message", ctypes.c_void_p),
        ]

    nvtx = ctypes.CDLL(path)
    for name in "nvtxDomainCreateA", "nvtxDomainCreateW", "nvtxDomainRegisterStringA", "nvtxDomainRegisterStringW":
        getattr(nvtx, name).restype = ctypes.c_void_p
    for name in "nvtxRangeStartA", "nvtxRangeStartW", "nvtxRangeStartEx", "nvtxDomainRangeStartEx":
        getattr(nvtx, name).restype = ctypes.c_uint64
    keep = []

    def attributes(kind, message):
        made = Attributes(version=2, size=ctypes.sizeof(Attributes), message_type=kind, message=message)
        keep.append(made)
        return ctypes.byref(made)

    def pointer(text):
        buffer = ctypes.create_string_buffer(text) if isinstance(text, bytes) else ctypes.create_unicode_buffer(text)
        keep.append(buffer)
        return ctypes.cast(buffer, ctypes.c_void_p)

    def around(name, begin, end):
        say("nvtx", "START", name)
        begun = begin()
        torch.empty(128, device="cuda")
        say("nvtx", "END", name)
        end(begun)

    def mark(name, call):
        say("nvtx", "START", name)
        say("nvtx", "END", name)
        call()

    pop, end = lambda _: nvtx.nvtxRangePop(), lambda number: nvtx.nvtxRangeEnd(ctypes.c_uint64(number))
    around("ascii", lambda: nvtx.nvtxRangePushA(b"ascii"), pop)
    around("wide \u00e4\u2192", lambda: nvtx.nvtxRangePushW(pointer("wide \u00e4\u2192")), pop)
    around("extended", lambda: nvtx.nvtxRangePushEx(attributes(1, pointer(b"extended"))), pop)
    around("start", lambda: nvtx.nvtxRangeStartA(b"start"), end)
    around("start wide", lambda: nvtx.nvtxRangeStartW(pointer("start wide")), end)
    around("start extended", lambda: nvtx.nvtxRangeStartEx(attributes(2, pointer("start extended"))), end)
    mark("mark", lambda: nvtx.nvtxMarkA(b"mark"))
    mark("mark wide", lambda: nvtx.nvtxMarkW(pointer("mark wide")))
    mark("mark extended", lambda: nvtx.nvtxMarkEx(attributes(1, pointer(b"mark extended"))))
    a, b = ctypes.c_void_p(nvtx.nvtxDomainCreateA(b"a")), ctypes.c_void_p(nvtx.nvtxDomainCreateW(pointer("b")))
    word = ctypes.c_void_p(nvtx.nvtxDomainRegisterStringA(a, b"registered"))
    wide = ctypes.c_void_p(nvtx.nvtxDomainRegisterStringW(b, pointer("registered wide")))
    push = lambda domain, text: lambda: nvtx.nvtxDomainRangePushEx(domain, attributes(3, text))
    around("a:registered", push(a, word), lambda _: nvtx.nvtxDomainRangePop(a))
    around("b:registered wide", push(b, wide), lambda _: nvtx.nvtxDomainRangePop(b))
    start = lambda: nvtx.nvtxDomainRangeStartEx(a, attributes(3, word))
    around("a:registered", start, lambda number: nvtx.nvtxDomainRangeEnd(a, ctypes.c_uint64(number)))
    mark("b:registered wide", lambda: nvtx.nvtxDomainMarkEx(b, attributes(3, wide)))
    # Ranges of two domains do not nest in each other.
    say("nvtx", "START", "a:registered")
    nvtx.nvtxDomainRangePushEx(a, attributes(3, word))
    say("nvtx", "START", "b:registered wide")
    nvtx.nvtxDomainRangePushEx(b, attributes(3, wide))
    say("nvtx", "END", "a:registered")
    nvtx.nvtxDomainRangePop(a)
    say("nvtx", "END", "b:registered wide")
    nvtx.nvtxDomainRangePop(b)


def other():
    here.name = "other"
    for _ in range(3):
        with named("on another thread"):
            torch.empty(2048, device="cuda")


def main():
    # Recording begins with the first block.
    torch.empty(64, device="cuda")
    train()
    odd()
    if "nvtx" in sys.argv:
        nvtx()
    if "package" in sys.argv:
        package()
    if "library" in sys.argv:
        library(sys.argv[-1])
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with open(os.environ["MEMTRACE_TEST_TRUTH"], "w") as file:
        json.dump(truth, file)
    print("done")


main()
