"""Records parts of itself, in the ways that its argument names. Prints what a test compares."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Callable

import gpu_memtrace
import torch

MIB = 1 << 20
case, folder = sys.argv[1], Path(sys.argv[2])


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def end_of(run: Path) -> int:
    """The allocated bytes at the end of a recording."""
    (process,) = json.loads((run / "summary.json").read_text())["processes"]
    (device,) = process["devices"]
    assert all(value == 0 for value in process["losses"].values()), process["losses"]
    return device["end"]["totals"]["allocated_bytes"]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except gpu_memtrace.RecordingError as error:
        return str(error)
    raise AssertionError("no error")


def launcher_of(recorder: gpu_memtrace.Recorder) -> int:
    """The id of the launcher: the child of this process that runs memtrace."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (found,) = (pid for pid in map(int, children) if b"attach" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def started_later(name: str) -> gpu_memtrace.Recorder:
    """A recorder after the launcher of another was killed: the library detaches by itself within a second or two."""
    until = time.monotonic() + 30
    while True:
        try:
            return gpu_memtrace.Recorder(f"{folder}-{name}", quiet=True).start()
        except gpu_memtrace.RecordingError as error:
            if "it is recorded already" not in str(error) or time.monotonic() > until:
                raise


before = block(3)
if case == "figures":
    # Each recording has what was there before, and what PyTorch counts at its end.
    with gpu_memtrace.Recorder(folder) as recorder:
        assert recorder.is_recording and recorder.folder == folder
        inside = block(5)
        assert "records this process already" in error_of(gpu_memtrace.Recorder(folder / "nested").start)
    assert not recorder.is_recording and end_of(folder) == torch.cuda.memory_allocated() == 8 * MIB
    outside = block(7)
    again = gpu_memtrace.Recorder(f"{folder}-2", quiet=True).start()
    last = block(1)
    again.stop()
    again.stop()
    assert end_of(again.folder) == torch.cuda.memory_allocated() == 16 * MIB
    assert "records once" in error_of(recorder.start)
    assert "it is not empty\nhelp: name another folder" in error_of(gpu_memtrace.Recorder(folder).start)
    assert "unexpected argument '--typo'" in error_of(gpu_memtrace.Recorder(options=["--typo"]).start)
    assert "has not started" in error_of(lambda: gpu_memtrace.Recorder().folder)
    assert str(recorder.report()).startswith("! Memtrace detached from the process")
elif case == "exception":
    try:
        with gpu_memtrace.Recorder(folder):
            inside = block(5)
            block(1 << 20)
    except torch.cuda.OutOfMemoryError:
        (process,) = json.loads((folder / "summary.json").read_text())["processes"]
        assert process["devices"][0]["ooms"][0]["requested_bytes"] == 1 << 40
    else:
        raise AssertionError("the block failed")
elif case == "threads":
    # One of many threads records. The main thread waits for them, and runs no Python.
    results = []

    def record(number: int) -> None:
        recorder = gpu_memtrace.Recorder(f"{folder}-{number}", quiet=True)
        try:
            with recorder:
                time.sleep(1)
            results.append("recorded")
        except gpu_memtrace.RecordingError as error:
            results.append(str(error).partition(",")[0])

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == 3 * ["a Recorder records this process already"] + ["recorded"], results
elif case == "fork":
    # A child neither ends the recording of its parent nor is kept from one of its own.
    with gpu_memtrace.Recorder(folder, quiet=True) as recorder:
        child = os.fork()
        if child == 0:
            assert not recorder.is_recording
            recorder.stop()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        inside = block(5)
    assert end_of(folder) == 8 * MIB
elif case == "interrupt":
    # Ctrl+C in a terminal reaches all processes of the group. The program goes on, and so does the recording.
    os.setpgid(0, 0)
    with gpu_memtrace.Recorder(folder, quiet=True):
        try:
            os.killpg(0, signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            pass
        inside = block(5)
    assert end_of(folder) == 8 * MIB
elif case == "ignored":
    # The launcher inherits ignored signals, as in `nohup python train.py &`. One of three is enough.
    ends = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    for number in ends:
        for other in ends:
            signal.signal(other, signal.SIG_DFL if other == number else signal.SIG_IGN)
        with gpu_memtrace.Recorder(f"{folder}-{number}", quiet=True) as recorder:
            inside = block(5)
        assert end_of(recorder.folder) == 8 * MIB
        del inside
    for number in ends:
        signal.signal(number, signal.SIG_IGN)
    assert "ignores SIGTERM, SIGINT and SIGHUP" in error_of(gpu_memtrace.Recorder(f"{folder}-4").start)
elif case == "launcher":
    # The launcher is killed: the program goes on, and the end of the block says so.
    with warnings.catch_warnings(record=True) as caught:
        try:
            with gpu_memtrace.Recorder(folder) as recorder:
                os.kill(launcher_of(recorder), signal.SIGKILL)
                inside = block(5)
                raise KeyError("of the program")
        except KeyError:
            pass
    assert [str(one.message) for one in caught] == ["the recording has failed: memtrace was ended by signal 9"], caught
    recorder = started_later("2")
    os.kill(launcher_of(recorder), signal.SIGKILL)
    assert error_of(recorder.stop) == "memtrace was ended by signal 9"
    recorder = started_later("3")
    inside = block(5)
    recorder.stop()
    assert end_of(recorder.folder) == 8 * MIB
elif case == "killed":
    gpu_memtrace.Recorder(folder).start()
    inside = block(5)
    print("done", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif case == "ends":
    # A program that ends without a stop.
    gpu_memtrace.Recorder(folder).start()
    inside = block(5)
elif case == "forbidden":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    text = error_of(gpu_memtrace.Recorder(folder).start)
    assert text.startswith(f"cannot attach to process {os.getpid()}: ") and "\nhelp: " in text, text
    assert not folder.exists()
elif case == "recorded":
    assert "records this process already; gpu_memtrace.annotate" in error_of(gpu_memtrace.Recorder(folder).start)
elif case == "many":
    threads_before = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    for number in range(8):
        with gpu_memtrace.Recorder(f"{folder}-{number}", quiet=True) as recorder:
            inside = block(number + 1)
        assert end_of(recorder.folder) == torch.cuda.memory_allocated()
    assert len(os.listdir("/proc/self/fd")) == files and threading.active_count() == threads_before
    assert subprocess.run(["true"], check=True).returncode == 0
else:
    raise AssertionError(case)
print("done")
