"""`python -m gpu_memtrace` is the same program as `memtrace`. It finds the binary of its own environment."""

import errno
import os
import platform
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from ._binary import BinaryNotFoundError, find_binary

# memtrace's own failures, as env(1) has them.
_FAILED = 125


def main() -> NoReturn:
    """Replace this process by memtrace, with the same arguments."""
    try:
        path = find_binary()
    except BinaryNotFoundError as error:
        _fail(str(error), error.help)
    environment = _environment()
    _restore_signals()
    try:
        os.execve(path, [path, *sys.argv[1:]], environment)
    except OSError as error:
        _fail("cannot run %s: %s" % (path, _reason(error)), _help(error))


def _environment() -> Mapping[bytes, bytes]:
    """The environment of this process, without the change that Python makes to LC_CTYPE in the C locale (PEP 538)."""
    environment = dict(os.environb)
    try:
        with open("/proc/self/environ", "rb") as file:
            original = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    except OSError:
        return environment
    if b"LC_CTYPE" in original:
        environment[b"LC_CTYPE"] = original[b"LC_CTYPE"]
    else:
        environment.pop(b"LC_CTYPE", None)
    return environment


def _restore_signals() -> None:
    """Restore what Python ignores when it starts, as `subprocess` does. A new program would inherit it."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return "it is a program for another processor, and this machine is %s" % (platform.machine() or "another one")
    # The kernel reports a missing loader as a missing file.
    if error.errno == errno.ENOENT:
        return "it needs glibc, and this system has none"
    return os.strerror(error.errno or 0)


def _help(error: OSError) -> str:
    if error.errno in (errno.ENOEXEC, errno.ENOENT):
        return (
            "memtrace needs Linux on x86-64 or AArch64 with glibc 2.28 or newer; "
            "musl systems such as Alpine have no glibc"
        )
    return "check the permissions of the file and the mount options of its file system"


def _fail(message: str, help: str) -> NoReturn:
    print("error: %s\nhelp: %s" % (message, help), file=sys.stderr)
    sys.exit(_FAILED)


if __name__ == "__main__":
    main()
