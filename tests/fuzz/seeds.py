#!/usr/bin/env python3
"""Writes the objects that the corpora of `object`, `preflight` and `unwind` started from. Needs gcc and objcopy."""

import pathlib
import struct
import subprocess
import tempfile

CORPUS = pathlib.Path(__file__).parent / "corpus"
SOURCE = """
static inline __attribute__((always_inline)) int inner(int x) { return x * 3 + 1; }
int g(int);
int outer(int x) { int a[4]; a[x & 3] = inner(x); return g(a[0]) + x; }
int realigned(int x) { int a __attribute__((aligned(64))) = x; int b[x]; b[0] = 7; return g(a + b[0]); }
int __attribute__((cold)) rare(int x) { return g(x) + 2; }
"""
VARIANTS = {
    "dwarf5": ["-gdwarf-5"],
    "dwarf4": ["-gdwarf-4"],
    "packed": ["-gdwarf-5", "-gz=zlib"],
    "plain": ["-g0"],
    "no-frame-pointer": ["-g1", "-fomit-frame-pointer", "-fasynchronous-unwind-tables"],
}


def put(target, name, content):
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    (CORPUS / target / name).write_bytes(content)


def image(elf):
    """The object as the loader maps it, and the positions of `.eh_frame_hdr` (offset, length), its code and its
    notes."""
    header_at, size, count = *struct.unpack_from("<Q", elf, 32), *struct.unpack_from("<HH", elf, 54)
    memory, frame, code, notes = bytearray(), (0, 0), 0, 0
    for n in range(count):
        kind, flags, offset, address, _, stored, length, _ = struct.unpack_from("<IIQQQQQQ", elf, header_at + n * size)
        if kind == 1:
            memory.extend(bytes(max(0, address + length - len(memory))))
            memory[address : address + stored] = elf[offset : offset + stored]
            if flags & 1:
                code = address
        elif kind == 0x6474E550:
            frame = (address, length)
        elif kind == 4 and not notes:
            notes = address
    return bytes(memory), frame, code, notes


with tempfile.TemporaryDirectory() as folder:
    source, built = pathlib.Path(folder, "a.c"), pathlib.Path(folder, "a.so")
    source.write_text(SOURCE)
    for name, flags in VARIANTS.items():
        layout = ["-Wl,-z,noseparate-code,-z,max-page-size=512,-z,common-page-size=512,--build-id"]
        nowhere = f"-ffile-prefix-map={folder}=/src"
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-O1", nowhere, *flags, *layout, "-o", built, source.name]
        subprocess.run(command, check=True, cwd=folder)
        elf = built.read_bytes()
        memory, (at, length), code, notes = image(elf)
        put("object", name, struct.pack("<4I", code + 5, code + 20, code + 40, code + 80) + elf)
        put("preflight", name, elf[:512])
        for ask in (code + 4, code + 30, code + 60, code + 100):
            put("unwind", f"{name}-{ask - code}", struct.pack("<4H", at, length, ask, notes) + memory)
    interpreter = b"/lib64/ld-linux-x86-64.so.2\0"
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    put("preflight", "dynamic", head + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(interpreter), 0, 1) + interpreter)
