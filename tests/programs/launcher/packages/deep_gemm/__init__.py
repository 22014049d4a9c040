"""Asserts the CUDA toolkit when it is imported, as DeepGEMM does."""

import os


def find_cuda_home():
    home = os.environ.get("CUDA_HOME")
    assert home is not None
    return home


find_cuda_home()
