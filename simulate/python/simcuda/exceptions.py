"""What the program died of, where that may be a value that a dry run does not compute."""

import atexit
import json
import os
import sys

import torch

OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

# The last line that read a value of a device, as (file, line).
last_read = None


def is_own(file):
    """Whether a source file is PyTorch's or of this package."""
    return file.startswith(OWN) or file.startswith("<frozen ")


def note_read():
    """Notes the line of the program that reads a value of a device."""
    global last_read
    frame = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        last_read = (frame.f_code.co_filename, frame.f_lineno)


def last_exception():
    """The exception that ended the program, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def is_out_of_memory(error):
    """Whether the exception, or one that led to it, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def place_of(error):
    """The innermost line outside of PyTorch of an exception's traceback, as (file, line)."""
    place, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = place if is_own(file) else (file, trace.tb_lineno)
        trace = trace.tb_next
    return place


def write(folder):
    """Writes what ended the program into a file of a folder, unless no value can be the reason."""
    error = last_exception()
    if not isinstance(error, Exception) or last_read is None or is_out_of_memory(error):
        return
    place = place_of(error)
    if place is None:
        return
    name = type(error).__name__
    text = json.dumps({"exception": name, "location": "%s:%d" % place, "read_location": "%s:%d" % last_read})
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w", encoding="utf-8") as file:
        file.write(text)


def install(folder):
    """Writes at the end of the process into a folder, if there is one."""
    if folder:
        atexit.register(write, folder)
