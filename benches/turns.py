"""Two ways of measuring the same work with and without a recorder, taking turns, so that the machine's drift falls on all alike.

`Forked`: one process a recorder, forked from one image before CUDA is touched. All have memtrace preloaded; only a process of
`STACKS` (and `PAUSED`) has a session. The stricter way: what is compared with never recorded anything.
`Toggled`: one process, in which one recorder after the other is on: machine, image, memory and caches are the same, but "off" has
memtrace's tracker attached and paused.
"""

import ctypes
import json
import os
import re

import frame

KINDS = ["off", "memtrace", "python", "all"]
# memtrace attached to PyTorch's allocator and paused at once: what PyTorch does for anybody who listens. `Forked` only.
PAUSED = "memtrace-paused"
# The kinds that memtrace records, by their --stacks.
STACKS = {"memtrace": "python", "memtrace-both": "both", "memtrace-native": "native", "memtrace-no-names": "python",
          "again-memtrace-no-names": "python"}
# PyTorch's recorder keeps the last this many events: few, since a larger ring costs it more (its memory is not in the caches).
ENTRIES = 20_000


def record(torch, kind):
    """PyTorch's recorder as this kind of process has it: on with these stacks, or off; after the first CUDA allocation."""
    if kind == PAUSED:
        ctypes.CDLL(None).memtrace_pause()
    stacks = kind if kind in ("python", "all") else None
    if stacks:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks=stacks)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def session(kind):
    """Leaves a child its session where it is memtrace's, with the stacks that the kind asks for; takes it from the others."""
    if kind in STACKS:
        value = os.environ["MEMTRACE_SESSION"]
        names = ";names=off" if kind.endswith("-no-names") else ""
        os.environ["MEMTRACE_SESSION"] = re.sub(r"stacks=\w+", f"stacks={STACKS[kind]}", value) + names
    elif kind != PAUSED:
        os.environ.pop("MEMTRACE_SESSION", None)


class Forked:
    """`prepare(kind)` runs in each child and returns `work(*arguments)`, whose result must be JSON. `done` is what was asked for."""

    about = "processes taking turns"
    more = [PAUSED]

    def __init__(self, kinds, prepare):
        self.children, self.done = {}, []
        for kind in kinds:
            requests, replies = os.pipe(), os.pipe()
            if os.fork() == 0:
                os.close(requests[1])
                os.close(replies[0])
                self._serve(kind, prepare, os.fdopen(requests[0]), os.fdopen(replies[1], "w"))
            os.close(requests[0])
            os.close(replies[1])
            self.children[kind] = (os.fdopen(requests[1], "w"), os.fdopen(replies[0]))
            self._reply(kind)

    @staticmethod
    def _serve(kind, prepare, requests, replies):
        status = 1
        try:
            session(kind)
            work = prepare(kind)
            print("null", file=replies, flush=True)
            for line in requests:
                print(json.dumps(work(*json.loads(line))), file=replies, flush=True)
            status = 0
        except BaseException as error:
            frame.say(f"{kind}: {error!r}")
            raise
        finally:
            os._exit(status)

    def _reply(self, kind):
        line = self.children[kind][1].readline()
        if not line:
            raise SystemExit(f"the process {kind} died")
        return json.loads(line)

    def __call__(self, kind, *arguments):
        self.done.append((kind, arguments))
        print(json.dumps(arguments), file=self.children[kind][0], flush=True)
        return self._reply(kind)

    def close(self):
        for requests, replies in self.children.values():
            requests.close()
            replies.close()
        for _ in self.children:
            os.wait()


class Toggled:
    """`prepare(None)` runs once, and `work` of it under each recorder in turn. `done` is what was done."""

    about = "one process, toggled"
    more = []

    def __init__(self, kinds, prepare):
        import torch

        self.torch, self.on, self.done = torch, "memtrace", []
        # The first event is recorded with memtrace on: from then on it is attached.
        self.library = ctypes.CDLL(None)
        self.work = prepare(None)
        self._switch("off")

    def __call__(self, kind, *arguments):
        if kind != self.on:
            self._switch(kind)
            # Not counted: what was switched on finds its caches cold and its ring of events empty.
            self._work(kind, arguments)
        return self._work(kind, arguments)

    def _work(self, kind, arguments):
        self.done.append((kind, arguments))
        return self.work(*arguments)

    def _switch(self, kind):
        record(self.torch, kind)
        if kind == "memtrace":
            self.library.memtrace_resume()
        else:
            self.library.memtrace_pause()
        self.on = kind

    def close(self):
        self._switch("off")


METHODS = {"forked": Forked, "toggled": Toggled}

def rounds(turns, kinds, count, *arguments):
    """`count` rounds of `work(*arguments)`, each kind first in its turn; the samples by kind."""
    samples = {kind: [] for kind in kinds}
    for index in range(count):
        first = index % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            samples[kind].append(turns(kind, *arguments))
    return samples
