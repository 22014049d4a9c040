"""`frames.py MODE`: allocates through ctypes in unusual Python environments and prints the frames that Python has."""
import ctypes
import json
import sys
import threading

runtime = ctypes.CDLL("libcudart.so.12")
noted = {}


def clean(text):
    """Replaces lone surrogates. Python decodes invalid bytes to them, and our file formats cannot hold them."""
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def note(size):
    frame, frames = sys._getframe(1), []
    while frame:
        frames.append([clean(frame.f_code.co_name), clean(frame.f_code.co_filename), frame.f_lineno])
        frame = frame.f_back
    noted[size] = frames


def allocate(size):
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0; note(size)


def greenlets():
    from greenlet import greenlet

    def work(first, other):
        for turn in range(4):
            deeper(first + turn, turn)
            others[other].switch()

    def deeper(size, depth):
        allocate(size) if depth == 0 else deeper(size, depth - 1)

    others = {}
    main = greenlet.getcurrent()
    others["a"] = greenlet(lambda: work(0x10000, "b"))
    others["b"] = greenlet(lambda: work(0x20000, "main"))
    others["main"] = main
    for turn in range(4):
        others["a"].switch()
        allocate(0x30000 + turn)


def recursion():
    limit = sys.getrecursionlimit()
    deepest = 0

    def down(depth):
        nonlocal deepest
        deepest = max(deepest, depth)
        if depth % 97 == 0:
            allocate(0x10000 + depth)
        try:
            down(depth + 1)
        except RecursionError:
            if depth > deepest - 40 and depth < deepest - 20:
                allocate(0x40000 + depth)

    down(1)
    assert deepest > limit * 0.9, deepest
    # On a thread with the smallest stack that Python allows.
    threading.stack_size(32 << 10)
    thread = threading.Thread(target=allocate, args=(0x80000,), name="sm\xe4ll \u2603")
    thread.start()
    thread.join()


def names():
    for number, name in enumerate(["caf\xe9.py", "/tmp/\udcff\udc80/x.py", "\u2603\U0001f40d.py", "", "a\nb\tc.py", "x" * 900]):
        code = f"def f\xfcnf_{number}():\n    allocate(0x10000 + {number})\nf\xfcnf_{number}()\n"
        exec(compile(code, name, "exec"), {"allocate": allocate})
    for number, name in enumerate(["", "\udcff", "has space \u2603 and more than fifteen bytes"]):
        thread = threading.Thread(target=allocate, args=(0x20000 + number,))
        thread.start()
        thread.join()


def interpreters():
    try:
        import _interpreters
        create, run = lambda: _interpreters.create("legacy"), _interpreters.run_string
    except ImportError:
        import _xxsubinterpreters as _interpreters
        create, run = lambda: _interpreters.create(isolated=False), _interpreters.run_string
    allocate(0x10000)
    for number in range(3):
        code = f"import sys; sys.argv = ['', 'quiet']; exec(open({__file__!r}).read())\n"
        code += f"def inner(n):\n    allocate(0x20000 + 16 * {number} + n)\nfor n in range(3): inner(n)\nprint(json.dumps(noted))"
        one = create()
        run(one, code)
        allocate(0x30000 + number)
        _interpreters.destroy(one)
    allocate(0x40000)


if sys.argv[1] != "quiet":
    globals()[sys.argv[1]]()
    print(json.dumps(noted))
