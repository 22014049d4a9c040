"""Compiles kernels."""

from .core import JitSpec
