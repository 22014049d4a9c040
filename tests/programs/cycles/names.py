"""Reference cycles whose names attack the page that shows them: markup, scripts, control characters."""

import gc

import torch

EVIL = "</title></script><script src=\"//x\">alert(1)</script><img>\x1b]0;x\x07\x9b\u202e"


def cycle(value):
    node = type(EVIL, (), {})()
    setattr(node, EVIL, {EVIL: node})
    node.data = value


def frame(value):
    def inner():
        return inner, value

    inner.__qualname__ = EVIL


gc.disable()
first = torch.zeros(8, device="cuda")
del first
torch.zeros(8, device="cuda")
for make in (cycle, frame):
    make(torch.ones(256, 256, device="cuda"))
    gc.collect()
