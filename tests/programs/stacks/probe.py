"""The stack probe through ctypes, and the comparison of its stacks with Python's own."""

import ctypes
import os
import sys

LIBRARY = os.environ["STACKPROBE"]


class Probe:
    """`released`: CDLL, which releases the GIL during a call; otherwise PyDLL, which keeps it."""

    def __init__(self, released):
        self.released = released
        self.library = (ctypes.CDLL if released else ctypes.PyDLL)(LIBRARY)
        self.capture = self.library.probe_capture
        self.capture.restype = ctypes.c_uint32
        self.stack_text = self.library.probe_stack
        self.stack_text.restype = ctypes.c_size_t
        self.reason_text = self.library.probe_reason
        self.reason_text.restype = ctypes.c_size_t
        self.count_of = self.library.probe_count
        self.count_of.restype = ctypes.c_uint64
        for name in ("probe_time_unchanged", "probe_time_once", "probe_time_nothing"):
            getattr(self.library, name).restype = ctypes.c_double

    def text(self, function, *arguments):
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = function(*arguments, buffer, ctypes.c_size_t(size))
            if length <= size:
                return buffer.raw[:length].decode("utf-8")
            size = length

    def reason(self):
        return self.text(self.reason_text)

    def stack(self, identity):
        """The frames, innermost first: (name, qualified name, file, line, first line)."""
        frames = []
        for frame in self.text(self.stack_text, identity).split("\x1e")[:-1]:
            fields = frame.split("\x1f")
            if len(fields) != 5:
                raise AssertionError(frame)
            frames.append((fields[0], fields[1], fields[2], int(fields[3]), int(fields[4])))
        return frames

    LOSSES = ("frame", "depth", "memory", "unverified", "text")

    def count(self, name):
        return self.count_of(name.encode())


def shown(text):
    """The text as the recorder writes it: lone surrogates are replaced."""
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def described(frame):
    """A frame and its callers as Python describes them, in the probe's format."""
    frames = []
    while frame is not None:
        code = frame.f_code
        qualname = getattr(code, "co_qualname", code.co_name)
        frames.append((shown(code.co_name), shown(qualname), shown(code.co_filename), frame.f_lineno or 0,
                       code.co_firstlineno))
        frame = frame.f_back
    return frames


class Mismatch(AssertionError):
    pass


def compare(got, want):
    if got != want:
        lines = ["the probe saw %d frames, Python has %d" % (len(got), len(want))]
        for index in range(max(len(got), len(want))):
            mine = got[index] if index < len(got) else None
            theirs = want[index] if index < len(want) else None
            if mine != theirs:
                lines.append("  at %d: probe %r, Python %r" % (index, mine, theirs))
            if len(lines) > 6:
                break
        raise Mismatch("\n".join(lines))


class Checker:
    """When called, captures the caller's stack with the probe and with Python, and compares both."""

    def __init__(self, probe):
        self.probe = probe
        self.released = probe.released
        self.checks = 0
        self.last = 0

    def __call__(self, *_ignored):
        probe = self.probe
        # Both captures are on one line, so that this frame has the same line in both.
        identity, want = probe.capture(), described(sys._getframe())
        compare(probe.stack(identity), want)
        again = probe.capture()
        compare(probe.stack(again), [(want[0][0], want[0][1], want[0][2], want[0][3] + 2, want[0][4])] + want[1:])
        self.checks += 1
        self.last = identity
        return 0
