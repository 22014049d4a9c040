"""Without memtrace, names and pauses have no effect. Functions that need a recording raise an error with help."""

import sys

import gpu_memtrace
from gpu_memtrace import _library


def function() -> int:
    return 7


assert not gpu_memtrace.is_recording() and _library.library is None
gpu_memtrace.pause()
gpu_memtrace.resume()
with gpu_memtrace.paused(), gpu_memtrace.annotate("name"):
    pass
assert gpu_memtrace.annotate("name")(function) is function, "a decorator costs nothing"
assert gpu_memtrace.profile(function) is function and gpu_memtrace.profile_every(2)(function)() == 7
for call in (
    gpu_memtrace.current,
    gpu_memtrace.peak,
    gpu_memtrace.run_folder,
    lambda: gpu_memtrace.snapshot("snapshot.pickle"),
    lambda: gpu_memtrace.lines(function),
):
    try:
        call()
    except gpu_memtrace.NotRecordedError as error:
        assert "memtrace -- python train.py" in str(error), error
    else:
        raise AssertionError(call)
with gpu_memtrace.LineProfiler(function) as profiler:
    function()
assert "memtrace -- python train.py" in str(profiler.display())
if "torch" not in sys.modules:
    assert len(gpu_memtrace.tensors().devices) == 0
    assert "torch" not in sys.modules, "the package does not import PyTorch"
print("done")
