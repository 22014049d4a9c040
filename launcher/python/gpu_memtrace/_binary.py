"""Finds the binary `memtrace` that was installed with this package."""

import os
import sysconfig
from collections.abc import Iterator

_NAME = "memtrace"
_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class BinaryNotFoundError(FileNotFoundError):
    """The binary of this package is missing. `help` says what to do."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


def find_binary() -> str:
    """Return the path of the binary `memtrace`.

    MEMTRACE_BIN names another one, for work on memtrace itself.

    Raises:
        BinaryNotFoundError: no folder that installers use has the binary.
    """
    if os.environ.get("MEMTRACE_BIN"):
        path = os.path.abspath(os.environ["MEMTRACE_BIN"])
        if os.path.isfile(path):
            return path
        raise BinaryNotFoundError(
            "cannot find MEMTRACE_BIN=%s" % path, "unset MEMTRACE_BIN to use the binary of this package"
        )
    others = []
    for folder in dict.fromkeys(_folders()):
        path = os.path.join(folder, _NAME)
        if not os.path.isfile(path):
            continue
        if _is_program(path):
            return path
        others.append(path)
    if others:
        message = "%s is not the binary of gpu-memtrace; another distribution may have replaced it" % others[0]
    else:
        message = "cannot find the binary memtrace of %s" % _PACKAGE
    raise BinaryNotFoundError(message, "reinstall it: pip install --force-reinstall gpu-memtrace")


def _folders() -> Iterator[str]:
    """The folders where installers put scripts. Those of the folder that holds this package come first."""
    site = os.path.dirname(_PACKAGE)
    # pip install --target
    yield os.path.join(site, "bin")
    # PREFIX/lib/pythonX.Y/site-packages: an environment, --prefix, --user, another environment on sys.path
    if os.path.basename(site) in ("site-packages", "dist-packages"):
        yield os.path.normpath(os.path.join(site, "..", "..", "..", "bin"))
    yield sysconfig.get_path("scripts")
    yield sysconfig.get_path("scripts", scheme="posix_user")


def _is_program(path: str) -> bool:
    """Whether the file is a compiled program. A Python script of the same name belongs to another distribution."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
