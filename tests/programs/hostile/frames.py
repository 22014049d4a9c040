"""`frames.py MODE`: allocates through ctypes in unusual Python environments and prints the frames that Python has."""
import ctypes
import json
import os
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


def deeper(size, depth):
    allocate(size) if depth == 0 else deeper(size, depth - 1)


def greenlets():
    from greenlet import greenlet

    def work(first, other):
        for turn in range(4):
            deeper(first + turn, turn)
            others[other].switch()

    others = {}
    main = greenlet.getcurrent()
    others["a"] = greenlet(lambda: work(0x10000, "b"))
    others["b"] = greenlet(lambda: work(0x20000, "main"))
    others["main"] = main
    for turn in range(4):
        others["a"].switch()
        allocate(0x30000 + turn)


def gevent():
    import gevent.monkey
    gevent.monkey.patch_all()
    import gevent.threadpool

    def work(first, depth):
        for turn in range(4):
            deeper(first + turn, depth + turn)
            gevent.sleep(0)

    def numbers():
        for number in range(8):
            allocate(0x90000 + number)
            yield

    def pull(count, depth):
        if depth:
            return pull(count, depth - 1)
        for _ in range(count):
            next(shared)
            gevent.sleep(0)

    def waits(size):
        try:
            allocate(size)
            gevent.sleep(3600)
        finally:
            deeper(size + 1, 3)

    # Each turn, one greenlet runs on the stack's addresses where another one has just been.
    jobs = [gevent.spawn(work, 0x10000 * (number + 1), number) for number in range(4)]
    # Two greenlets resume the same generator, from different depths.
    shared = numbers()
    jobs += [gevent.spawn(pull, 4, 0), gevent.spawn(pull, 4, 5)]
    # An exception ends a greenlet where it waits.
    killed = gevent.spawn(waits, 0xa0000)
    gevent.sleep(0)
    pool = gevent.threadpool.ThreadPool(2)
    results = [pool.spawn(deeper, 0xb0000 + number, number) for number in range(4)]
    gevent.joinall(jobs)
    killed.kill()
    with gevent.Timeout(0.001, False):
        waits(0xc0000)
    for result in results:
        result.get()
    # A thread of the patched threading module is a greenlet.
    thread = threading.Thread(target=deeper, args=(0xd0000, 2))
    thread.start()
    thread.join()


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
    # On a thread with the smallest stack that Python allows: more from 3.14 on.
    try:
        threading.stack_size(32 << 10)
    except ValueError:
        threading.stack_size(52 << 10)
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
    print(json.dumps(noted, sort_keys=True))
    if "perf" in sys._xoptions:
        os.unlink(f"/tmp/perf-{os.getpid()}.map")
