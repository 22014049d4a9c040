"""Prints the modules that an import and the use of names add to those of a plain Python."""

import sys

before = set(sys.modules)
import gpu_memtrace  # noqa: E402

imported = set(sys.modules)
with gpu_memtrace.annotate("name"):
    gpu_memtrace.annotate("other")(print)
used = set(sys.modules)
print(*sorted(imported - before))
print(*sorted(used - imported))
missing = [name for name in gpu_memtrace.__all__ if name not in dir(gpu_memtrace) or getattr(gpu_memtrace, name) is None]
assert not missing, missing
try:
    gpu_memtrace.no_such_name
except AttributeError as error:
    assert str(error) == "module 'gpu_memtrace' has no attribute 'no_such_name'", error
else:
    raise AssertionError("there is no such name")
