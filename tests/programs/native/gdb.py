"""For gdb: writes the stack of every call of an allocation function inside the simulated CUDA to $GDB_STACKS.

One line of JSON a call: {"function", "size", "thread", "frames": [[object, address], ...]}, innermost first, from the
function on. Addresses have the form of return addresses, in the object's own numbering. Frames that gdb synthesizes
(inlined functions, tail calls) are left out. GDB_SMALLEST=BYTES leaves out smaller allocations.
"""

import json
import os
import re
import struct
import subprocess

import gdb

# Both functions take the size as their second argument.
FUNCTIONS = {"libcuda.so.1": "cuMemAlloc_v2", "libcudart.so.12": "cudaMalloc", "libcudart.so.13": "cudaMalloc"}
SMALLEST = int(os.environ.get("GDB_SMALLEST", "0"))
out = open(os.environ["GDB_STACKS"], "w", encoding="utf-8")


def first_segment(path):
    """The address that the first segment of an ELF file is linked at, or None when the file is no ELF file."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return None
            file.seek(32)
            (table,) = struct.unpack("<Q", file.read(8))
            file.seek(54)
            size, count = struct.unpack("<HH", file.read(4))
            for index in range(count):
                file.seek(table + index * size)
                kind, _, _, address = struct.unpack("<IIQQ", file.read(24))
                if kind == 1:
                    return address & ~4095
    except OSError:
        pass
    return None


class Maps:
    """The mapped files of the process at this time."""

    links = {}

    def __init__(self):
        self.ranges, self.bases = [], {}
        with open("/proc/%d/maps" % gdb.selected_inferior().pid, encoding="utf-8") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                start, end = (int(x, 16) for x in fields[0].split("-"))
                # A file that was replaced or deleted meanwhile is still the mapped one.
                path = fields[5].rstrip("\n").removesuffix(" (deleted)") if len(fields) == 6 else ""
                self.ranges.append((start, end, path))
                if path.startswith("/"):
                    self.bases.setdefault(path, start)

    def place(self, address):
        """(object, address in its own numbering) of a return address; "" and the address itself in generated code."""
        for start, end, path in self.ranges:
            if start <= address - 1 < end:
                if path not in self.bases:
                    return path, address
                if path not in Maps.links:
                    Maps.links[path] = first_segment(path)
                return path, address - self.bases[path] + (Maps.links[path] or 0)
        return "", address


def frames(maps):
    found, exact, frame = [], True, gdb.newest_frame()
    while frame is not None:
        kind = frame.type()
        if kind in (gdb.NORMAL_FRAME, gdb.SIGTRAMP_FRAME):
            # A frame that a signal interrupted is at an instruction, not after a call.
            found.append(maps.place(frame.pc() + exact))
            exact = kind == gdb.SIGTRAMP_FRAME
        frame = frame.older()
    return found


class Call(gdb.Breakpoint):
    def __init__(self, name, address):
        super().__init__("*%#x" % address, internal=True)
        self.silent, self.name = True, name

    def stop(self):
        size = int(gdb.parse_and_eval("(unsigned long)$rsi"))
        if size >= SMALLEST:
            thread = gdb.selected_thread().ptid[1]
            call = {"function": self.name, "size": size, "thread": thread, "frames": frames(Maps())}
            out.write(json.dumps(call) + "\n")
            out.flush()
        return False


def loaded(event):
    path = os.path.realpath(event.new_objfile.filename)
    for start, name in FUNCTIONS.items():
        if re.match(re.escape(start) + r"($|[.-])", os.path.basename(path)):
            symbols = subprocess.run(["nm", "-D", path], stdout=subprocess.PIPE, check=True).stdout.decode()
            base = Maps().bases.get(path)
            for line in symbols.splitlines():
                fields = line.split()
                if base is not None and len(fields) == 3 and fields[2].split("@")[0] == name:
                    Call(name, base + int(fields[0], 16))


for setting in (
    "auto-load off", "backtrace past-main on", "backtrace past-entry on", "backtrace limit unlimited", "breakpoint pending on",
    "confirm off", "debuginfod enabled off", "pagination off", "startup-with-shell off", "print thread-events off",
):
    gdb.execute("set " + setting)
gdb.execute("handle all nostop noprint pass")
gdb.execute("handle SIGTRAP stop")
gdb.events.new_objfile.connect(loaded)
gdb.execute("run")
code = gdb.parse_and_eval("$_exitcode")
gdb.execute("quit %d" % (255 if code.type.code == gdb.TYPE_CODE_VOID else int(code)))
