"""Kernels as FlashInfer compiles them."""


class JitSpec:
    """A module of kernels. One with a compiled file is loaded."""

    def __init__(self, name, compiled=None):
        self.name, self.compiled = name, compiled

    def write_ninja(self):
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

    def build_and_load(self):
        if self.compiled is None:
            self.write_ninja()
        return self.compiled
