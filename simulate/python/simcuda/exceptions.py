"""Notes the error that ended the program, if its cause may be a value that a dry run does not compute, or a missing CUDA toolkit: an
exception, or an exit with a status that means a failure.
"""

import atexit
import functools
import json
import os
import re
import sys
import traceback
from multiprocessing import process

import torch

from . import kernels

OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
# It ends processes by the same functions as programs do, after it has printed their exceptions.
MULTIPROCESSING = os.path.dirname(process.__file__) + os.sep

# Names by which packages look for the CUDA toolkit, in messages of exceptions and in names of functions.
TOOLKIT = re.compile(r"cuda[ _]?(home|path|toolkit)|nvcc", re.IGNORECASE)

# The last line that read a value of a device, as (file, line).
last_read = None
# The line that called sys.exit with the status of a failure, as (file, line).
failing_exit = None


def is_own(file):
    """Whether a source file is PyTorch's or of this package."""
    return file.startswith(OWN) or file.startswith("<frozen ")


def line_of_program():
    """The line outside of PyTorch that is being executed, as (file, line), or None."""
    frame = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def line_of_read():
    """The line that is being executed, which can be PyTorch's own, as (file, line), or None. One line of the program reads many values
    in an optimizer or a solver, for example."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN[1]):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def note_read():
    """Notes the line of the program that reads a value of a device."""
    global last_read
    last_read = line_of_program() or last_read


def last_exception():
    """The exception that ended the program, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def chain_of(error):
    """The exception, and those that led to it."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error):
    """Whether the exception, or one that led to it, is an out-of-memory error."""
    return any(isinstance(one, (torch.cuda.OutOfMemoryError, MemoryError)) for one in chain_of(error))


def needs_toolkit(error):
    """Whether an exception says that there is no CUDA toolkit, by its message or by the function that raised it."""
    function = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        function = frame.f_code.co_name
    return TOOLKIT.search(function) is not None or TOOLKIT.search(str(error)) is not None


def place_of(error):
    """The innermost line outside of PyTorch of an exception's traceback, as (file, line)."""
    place, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = place if is_own(file) else (file, trace.tb_lineno)
        trace = trace.tb_next
    return place


def has_run_out_of_memory():
    """Whether an allocation on a device failed in this process, also if the program handled the error."""
    try:
        return any(torch.cuda.memory_stats(device).get("num_ooms", 0) for device in range(torch.cuda.device_count()))
    except Exception:
        return False


def write(folder, name, place):
    """Writes into a file of a folder what ended the program, and where."""
    text = json.dumps({"exception": name, "location": "%s:%d" % place, "read_location": "%s:%d" % last_read})
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w", encoding="utf-8") as file:
        file.write(text)


def write_missing_toolkit(folder, error):
    """Writes into a file of a folder which package needs the CUDA toolkit, if an exception, or one that led to it, says so."""
    for one in chain_of(error):
        place = place_of(one) if not kernels.has_nvcc() and needs_toolkit(one) else None
        if place is not None:
            package = re.search(r"(?:site|dist)-packages/(\w+)", place[0])
            text = {"exception": type(one).__name__, "location": "%s:%d" % place, "package": package and package[1]}
            with open(os.path.join(folder, f"{os.getpid()}.toolkit.json"), "w", encoding="utf-8") as file:
                json.dump(text, file)


def note_missing_toolkit(folder):
    """Notes exceptions about the CUDA toolkit that the program prints or logs. Workers of servers do that, and end without
    raising them.
    """
    own = traceback.TracebackException.__init__

    @functools.wraps(own)
    def init(summary, exc_type, exc_value, *args, **kwargs):
        try:
            write_missing_toolkit(folder, exc_value)
        except Exception:
            pass
        own(summary, exc_type, exc_value, *args, **kwargs)

    traceback.TracebackException.__init__ = init


def write_at_end(folder):
    """Writes what ended the program into a file of a folder, unless neither a value nor the CUDA toolkit can be the reason."""
    error = last_exception()
    write_missing_toolkit(folder, error)
    if last_read is None:
        return
    if isinstance(error, Exception):
        place = place_of(error)
        if place is not None and not is_out_of_memory(error):
            write(folder, type(error).__name__, place)
    elif failing_exit is not None and not has_run_out_of_memory():
        write(folder, "SystemExit", failing_exit)


def is_failure(status):
    """Whether a status for sys.exit means that the program failed."""
    return status is not None and status != 0


def failing_line(status):
    """The line of the program that ends it with a status of a failure, or None."""
    place = line_of_program() if is_failure(status) else None
    return None if place is None or place[0].startswith(MULTIPROCESSING) else place


def note_exits(folder):
    """Notes the lines that call sys.exit and os._exit with the status of a failure."""
    own_exit, own_immediate_exit = sys.exit, os._exit

    @functools.wraps(own_exit)
    def exit(status=None, /):
        global failing_exit
        failing_exit = failing_line(status)
        own_exit(status)

    @functools.wraps(own_immediate_exit)
    def _exit(status):
        place = failing_line(status)
        try:
            if place is not None and last_read is not None and not has_run_out_of_memory():
                write(folder, "os._exit", place)
        finally:
            own_immediate_exit(status)

    sys.exit, os._exit = exit, _exit


def install(folder):
    """Writes at the end of the process into a folder, if there is one."""
    if folder:
        atexit.register(write_at_end, folder)
        note_missing_toolkit(folder)
        note_exits(folder)
