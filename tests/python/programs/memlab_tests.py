"""Runs pytorch_memlab's own tests with gpu_memtrace.memlab in its place: memlab_tests.py FOLDER [PYTEST OPTION...]."""

import sys

import gpu_memtrace.memlab
import pytest
import torch

# The simulated cuDNN has no recurrent networks. PyTorch's own ones need no cuDNN.
torch.backends.cudnn.enabled = False
gpu_memtrace.memlab.install()


class OnlyOurs:
    """Fails if a test has imported the real package."""

    def pytest_sessionfinish(self) -> None:
        modules = [m for n, m in sys.modules.items() if n == "pytorch_memlab" or n.startswith("pytorch_memlab.")]
        assert modules and all(m.__name__.startswith("gpu_memtrace.") for m in modules), modules


sys.exit(pytest.main([sys.argv[1], "-p", "no:cacheprovider", "-q", "-rA", *sys.argv[2:]], plugins=[OnlyOurs()]))
