"""One copy of each of NVIDIA's libraries: the simulated one.

PyTorch 2.14 and later load the libraries of NVIDIA's wheels by their paths while they are imported, and other packages
load those that they find in `/proc/self/maps`. To the dynamic linker a path is another library than the preloaded one of
the same name. It would be the real one, which finds no GPU.
"""

import ctypes
import functools
import os

FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def simulated(name):
    """The path of the simulated library that a path stands for, or else the name itself."""
    if not isinstance(name, (str, os.PathLike)) or os.sep not in os.fspath(name):
        return name
    path = os.path.join(FOLDER, os.path.basename(os.fspath(name)))
    return path if os.path.isfile(path) else name


def install():
    """Replaces what `ctypes` opens."""
    own = ctypes.CDLL.__init__

    @functools.wraps(own)
    def init(self, name, *arguments, **options):
        own(self, simulated(name), *arguments, **options)

    ctypes.CDLL.__init__ = init
