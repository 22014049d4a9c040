"""Two ways to measure the same work with and without a recorder, taking turns, so that the machine's drift affects all
alike.

`Forked`: one process per recorder, forked from one image before CUDA is used. All have memtrace preloaded, and only
processes of `STACKS` and `PAUSED` have a session. This is the stricter way: the baseline never recorded anything.
`Toggled`: one process that enables one recorder after the other. Machine, image, memory and caches are the same, but in
"off" memtrace's tracker is attached and paused.
"""

import ctypes
import json
import os
import re

import frame

KINDS = ["off", "memtrace", "python", "all"]
# memtrace attached to PyTorch's allocator and paused: the cost of PyTorch's calls to any tracker. `Forked` only.
PAUSED = "memtrace-paused"
# The kinds that memtrace records, with their --stacks.
STACKS = {"memtrace": "python", "memtrace-both": "both", "memtrace-native": "native", "memtrace-no-names": "python",
          "again-memtrace-no-names": "python"}
# The size of PyTorch's ring of events. It is small, because a larger ring does not fit in the caches and costs more.
ENTRIES = 20_000


def record(torch, kind):
    """Sets PyTorch's recorder for this kind of process: on with these stacks, or off. Call it after the first CUDA
    allocation."""
    if kind == PAUSED:
        ctypes.CDLL(None).memtrace_pause()
    stacks = kind if kind in ("python", "all") else None
    if stacks:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks=stacks)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def session(kind):
    """Keeps a child's session, with the kind's stacks, where memtrace records the kind; removes it from the others."""
    if kind in STACKS:
        value = os.environ["MEMTRACE_SESSION"]
        value = re.sub(r"stacks=\w+", f"stacks={STACKS[kind]}", value)
        names = "off" if kind.endswith("-no-names") else "on"
        os.environ["MEMTRACE_SESSION"] = re.sub(r"names=\w+", f"names={names}", value)
    elif kind != PAUSED:
        os.environ.pop("MEMTRACE_SESSION", None)


class Forked:
    """`prepare(kind)` runs in each child and returns `work(*arguments)`, whose result must be JSON. `done` is the
    requested work."""

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
    """`prepare(None)` runs once; its `work` runs under each recorder in turn. `done` is the work that was done."""

    about = "one process, toggled"
    more = []

    def __init__(self, kinds, prepare):
        import torch

        self.torch, self.on, self.done = torch, "memtrace", []
        # The first event is recorded with memtrace enabled, which attaches it for the rest of the process.
        self.library = ctypes.CDLL(None)
        self.work = prepare(None)
        self._switch("off")

    def __call__(self, kind, *arguments):
        if kind != self.on:
            self._switch(kind)
            # Not measured: a recorder that was just enabled has cold caches and an empty event ring.
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
    """`count` rounds of `work(*arguments)`, with each kind first in turn; returns the samples by kind."""
    samples = {kind: [] for kind in kinds}
    for index in range(count):
        first = index % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            samples[kind].append(turns(kind, *arguments))
    return samples
