"""Programs whose stacks are captured: each `case_*` calls `check`, which compares the probe with Python itself."""

import asyncio
import ctypes
import functools
import gc
import os
import random
import subprocess
import sys
import threading
import types

from probe import Mismatch, described, compare


def case_plain_nesting(check):
    def inner(n):
        if n:
            inner2(n - 1)
        check()

    def inner2(n):
        check()
        inner(n)
        check()

    inner(12)


def case_same_callee_from_two_lines(check):
    def callee():
        check()

    def caller():
        callee()
        callee()
        for _ in range(3):
            callee(); callee()
        (callee(),
         callee(),
         [callee()])

    for _ in range(3):
        caller()


def case_same_leaf_under_two_callers(check):
    def leaf():
        check()

    def one():
        leaf()

    def two():
        leaf()

    for _ in range(5):
        one()
        two()


def case_depth_up_and_down(check):
    def down(n):
        if n == 0:
            check()
        else:
            down(n - 1)

    for depth in [0, 1, 2, 5, 20, 19, 21, 3, 40, 39, 41, 1, 90, 0, 90, 60, 91, 92, 96, 95, 88, 300, 2]:
        down(depth)
        down(depth)


def case_recursion_to_the_limit(check):
    deepest = []

    def down(n):
        deepest.append(n)
        try:
            down(n + 1)
        except RecursionError:
            pass
        if n == 900 or n == 5:
            check()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        down(0)
    finally:
        sys.setrecursionlimit(limit)
    assert deepest[-1] > 850, deepest[-1]


def case_very_deep(check):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(30000)

    def down(n):
        if n:
            return down(n - 1)
        check()
        check()

    def work():
        down(10000)
        down(100)
        down(9000)

    run_in_thread(work, stack_size=512 << 20)
    sys.setrecursionlimit(limit)


def run_in_thread(work, stack_size=0):
    failure = []

    def guarded():
        try:
            work()
        except BaseException as error:
            failure.append(error)

    old = threading.stack_size(stack_size)
    thread = threading.Thread(target=guarded)
    thread.start()
    threading.stack_size(old)
    thread.join()
    if failure:
        raise failure[0]


def case_generators(check):
    def numbers(n):
        for i in range(n):
            check()
            yield i

    def delegating(n):
        check()
        yield from numbers(n)
        yield from (check() for _ in range(n))

    assert sum(numbers(3)) == 3
    list(delegating(3))
    g = delegating(9)

    def resume():
        next(g)

    def resume_deeper():
        resume()

    for _ in range(3):
        resume()
        resume_deeper()
        next(g)
    g.close()


def case_generator_close_and_throw(check):
    def generator():
        try:
            yield 1
        except ValueError:
            check()
            yield 2
        finally:
            check()

    g = generator()
    next(g)
    assert g.throw(ValueError()) == 2
    g.close()
    g = generator()
    next(g)
    del g
    unstarted = generator()
    try:
        unstarted.throw(KeyError())
    except KeyError:
        check()


def case_coroutines(check):
    class Awaitable:
        def __await__(self):
            check()
            yield from asyncio.sleep(0).__await__()
            check()

    class Context:
        async def __aenter__(self):
            check()

        async def __aexit__(self, *_):
            check()

    async def leaf(n):
        check()
        await asyncio.sleep(0)
        check()
        await Awaitable()
        return n

    async def stream(n):
        for i in range(n):
            check()
            yield await leaf(i)

    async def main():
        async with Context():
            await asyncio.gather(*[leaf(i) for i in range(4)])
            async for _ in stream(3):
                check()
            [check() async for _ in stream(2)]
        task = asyncio.ensure_future(leaf(1))
        await task

    asyncio.run(main())


def case_comprehensions(check):
    [check() for _ in range(2)]
    {check() for _ in range(2)}
    {i: check() for i in range(2)}
    list(check() for _ in range(2))
    [[check() for _ in range(2)] for _ in range(2)]
    [
        check()
        for _ in range(2)
        if not check()
    ]


def case_lambdas_made_again(check):
    for i in range(50):
        f = lambda: check()  # noqa: E731
        g = lambda x: [  # noqa: E731
            check(),
            check(),
        ]
        f()
        g(i)
    stacks = check.probe.count("stacks")
    for i in range(200):
        f = lambda: check()  # noqa: E731
        f()
    assert check.probe.count("stacks") - stacks < 20, "stacks of re-created lambdas grow"


def case_exec_same_code_again(check):
    """The tables must not grow when equal code is compiled again."""
    source = "def generated():\n    check()\ngenerated()\n"
    for _ in range(20):
        exec(compile(source, "<generated>", "exec"), {"check": check})
    stacks, frames = check.probe.count("stacks"), check.probe.count("frames")
    for _ in range(300):
        exec(compile(source, "<generated>", "exec"), {"check": check})
    assert check.probe.count("stacks") - stacks < 20, "stacks of re-compiled code grow"
    assert check.probe.count("frames") - frames < 20, "frames of re-compiled code grow"


def case_exec_same_names_other_lines(check):
    """Code objects are freed and others take their addresses, with equal names and sizes but other lines."""
    rng = random.Random(1)
    addresses, reused = set(), 0
    for round in range(600):
        before = rng.randrange(40)
        source = "%sdef generated():\n%s    check()\n%s    check()\ngenerated()\n" % (
            "\n" * (before % 3), "\n" * before, "\n" * (40 - before))
        space = {"check": check}
        exec(compile(source, "<generated>", "exec"), space)
        address = id(space["generated"].__code__)
        reused += address in addresses
        addresses.add(address)
        del space
        if round % 3 == 0:
            gc.collect()
    assert reused > 100, "the case does not test what it should: %d addresses re-used" % reused


def case_exec_other_names_same_sizes(check):
    reused, addresses = 0, set()
    for n in range(400):
        source = "def generated_%03d():\n    check()\ngenerated_%03d()\n" % (n, n)
        space = {"check": check}
        exec(compile(source, "<generated-%03d>" % n, "exec"), space)
        address = id(space["generated_%03d" % n].__code__)
        reused += address in addresses
        addresses.add(address)
        del space
        if n % 3 == 0:
            gc.collect()
    assert reused > 50, reused


def case_eval_in_a_loop_of_equal_frames(check):
    """The same frame address, code address and instruction, but other text: only the code object's end shows it."""
    for n in range(300):
        code = compile("\n" * (n % 7) + "check()", "<e%d>" % (n % 5), "eval")
        eval(code, {"check": check})
        del code


def case_code_freed_in_another_thread(check):
    def work():
        for n in range(100):
            exec(compile("\n" * (n % 9) + "def f():\n    check()\nf()", "<t>", "exec"), {"check": check})

    threads = [threading.Thread(target=guard(work)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise_failures()


_failures = []


def guard(work):
    def guarded():
        try:
            work()
        except BaseException as error:
            _failures.append(error)
    return guarded


def raise_failures():
    failures, _failures[:] = list(_failures), []
    if failures:
        raise failures[0]


def case_class_bodies_and_decorators(check):
    def decorate(f):
        check()

        @functools.wraps(f)
        def wrapper(*args):
            check()
            return f(*args)
        return wrapper

    for _ in range(2):
        class Outer:
            check()

            class Inner(metaclass=type):
                check()

                @decorate
                def method(self):
                    check()

            @property
            def value(self):
                return check()

            @staticmethod
            @decorate
            def static():
                check()

            def __getattr__(self, name):
                check()
                return name

            def __del__(self):
                check()

        Outer.Inner().method()
        outer = Outer()
        outer.value
        outer.missing
        Outer.static()
        del outer


def case_c_callbacks(check):
    sorted([3, 1, 2], key=lambda n: check() or n)
    list(map(lambda n: check(), range(3)))
    functools.partial(lambda a, b: check(), 1)(2)
    functools.reduce(lambda a, b: check(), range(4))
    max([1, 2], key=check)
    functools.lru_cache(maxsize=None)(lambda: check())()

    class Key:
        def __lt__(self, other):
            check()
            return False

        def __hash__(self):
            check()
            return 1

        def __eq__(self, other):
            check()
            return True

        def __call__(self):
            check()

        def __iter__(self):
            check()
            return iter(())

    sorted([Key(), Key()])
    {Key(): 1, Key(): 2}
    Key()()
    list(Key())
    "%s" % type("T", (), {"__str__": lambda self: str(check())})()


def case_ctypes_callbacks(check):
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)
    failures = []

    def order(a, b):
        try:
            check()
        except BaseException as error:
            failures.append(error)
        return 0

    numbers = (ctypes.c_int * 3)(3, 2, 1)
    libc.qsort(numbers, 3, ctypes.sizeof(ctypes.c_int), callback(order))
    if failures:
        raise failures[0]


def case_multi_line_calls(check):
    def take(*args, **kwargs):
        check()
        return 1

    take(
        1,
        take(
            2,
        ),
        *[
            take(3),
        ],
        key=take(
            4,
        ),
    )
    value = (take(1)
             + take(2)
             + take(
                 3) if take(4)
             else 5)
    assert (
        take(1) and
        take(2)
    )
    with_text = f"""
    {take(1)}
    {
        take(2)
    }
    """
    table = {
        take(1): take(2),
        "x": take(
            3
        ),
    }
    (take)(
    ), table, with_text, value
    obj = types.SimpleNamespace(a=types.SimpleNamespace(take=take))
    (obj
        .a
        .take(
            1
        ))


def case_control_flow(check):
    try:
        try:
            check()
            raise ValueError
        except ValueError:
            check()
        finally:
            check()
    finally:
        check()
    i = 0
    while not check() and i < 3:
        i += 1
        if i == 2:
            continue
        check()
    else:
        check()
    with open(os.devnull) as f, \
            open(os.devnull) as g:
        check(f, g)
    import contextlib

    @contextlib.contextmanager
    def context():
        check()
        yield
        check()

    with context():
        check()


def case_non_ascii(check):
    def größe():
        check()

    def 測試():
        größe()

    測試()
    for filename in ["ünï.py", "測試.py", "emoji-\U0001f600.py", "latin-\xff.py", "surrogate-\udc80.py", "", "x" * 5000,
                     "ü" * 1500, "\U0001f600" * 900]:
        for name in ["f", "größe", "測試", "𝒳"]:
            code = compile("def %s():\n  check()\n%s()" % (name, name), filename, "exec")
            exec(code, {"check": check})


def case_threads(check):
    def work(n):
        def down(depth):
            check()
            if depth:
                down(depth - 1)
                check()

        for _ in range(5):
            down(n)

    threads = [threading.Thread(target=guard(functools.partial(work, n))) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise_failures()


def case_tracing(check):
    lines = []

    def trace(frame, event, argument):
        if frame.f_code.co_filename == __file__:
            lines.append(frame.f_lineno)
        return trace

    def traced(n):
        check()
        for _ in range(n):
            check()
        return [
            check(),
            check(),
        ]

    def profile(frame, event, argument):
        pass

    sys.settrace(trace)
    try:
        traced(2)
    finally:
        sys.settrace(None)
    sys.setprofile(profile)
    try:
        traced(2)
    finally:
        sys.setprofile(None)
    assert lines


def case_inside_a_trace_function(check):
    seen = []

    def trace(frame, event, argument):
        if frame.f_code is traced.__code__ and not seen:
            seen.append(1)
            check()
        return trace

    def traced():
        a = 1
        return a

    sys.settrace(trace)
    try:
        traced()
    finally:
        sys.settrace(None)
    assert seen


def case_monitoring(check):
    if not hasattr(sys, "monitoring"):
        return
    monitoring, tool, calls = sys.monitoring, sys.monitoring.DEBUGGER_ID, []
    events = monitoring.events
    monitoring.use_tool_id(tool, "probe")

    def callback(*args):
        calls.append(args)
        check()

    def monitored(n):
        check()
        for i in range(n):
            check() if i else None
        return check()

    for event in (events.LINE, events.PY_START, events.PY_RETURN, events.CALL, events.INSTRUCTION, events.JUMP):
        monitoring.register_callback(tool, event, callback)
        monitoring.set_local_events(tool, monitored.__code__, event)
        try:
            monitored(2)
        finally:
            monitoring.set_local_events(tool, monitored.__code__, 0)
            monitoring.register_callback(tool, event, None)
        monitored(2)
    monitoring.free_tool_id(tool)
    assert calls


def case_garbage_collector_callbacks(check):
    """Finalizers run wherever the collector runs, including inside a function's prologue."""
    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            check()

    def with_cells(a, b):
        def inner():
            return a, b
        return inner

    def generator(a):
        def inner():
            return a
        yield inner

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(30):
            Cycle()
            with_cells([], {})()
            list(generator([]))
            (lambda *a, **k: (a, k))([], x={})
    finally:
        gc.set_threshold(*threshold)


def case_hot_function(check):
    """Enough calls that the interpreter specializes its instructions."""
    def callee(n):
        if n % 500 == 0:
            check()
        return n

    def caller():
        total = 0
        for n in range(3000):
            total += callee(n)
        return total

    caller()


def case_greenlets(check):
    try:
        import greenlet
    except ImportError:
        return

    def child(depth):
        if depth:
            return child(depth - 1)
        check()
        main.switch()
        check()
        main.switch()

    def outer():
        check()
        one.switch(3)
        check()
        two.switch(5)
        check()
        one.switch()
        two.switch()
        check()

    main = greenlet.getcurrent()
    one, two = greenlet.greenlet(child), greenlet.greenlet(child)
    outer()


def case_random_programs(check):
    """Random walks over generated functions that share names and lines exercise the caches."""
    rng = random.Random(7)
    for round in range(8):
        functions = []
        for n in range(6):
            body = ["def f(path):", "    if not path: return check()", "    head, rest = path[0], path[1:]"]
            for line in range(4):
                body.append("    if head[1] == %d: functions[head[0]](rest)" % line)
                if rng.random() < 0.5:
                    body.append("    if head[1] == %d: list(functions[head[0]](rest) for _ in [0])" % line)
                if rng.random() < 0.3:
                    body.append("    check()")
            space = {"check": check, "functions": functions}
            exec(compile("\n" * rng.randrange(3) + "\n".join(body), "<r%d>" % rng.randrange(3), "exec"), space)
            functions.append(space["f"])
        path = []
        for _ in range(12):
            if rng.random() < 0.4 and path:
                path = path[:rng.randrange(len(path))]
            path = path + [(rng.randrange(6), rng.randrange(4)) for _ in range(rng.randrange(3))]
            functions[0](path[:6])


def case_no_frames_for_a_foreign_thread(check):
    """A thread that Python does not know has no Python stack."""
    libc = ctypes.CDLL(None)
    thread, result = ctypes.c_ulong(), ctypes.c_void_p()
    entry = ctypes.cast(check.probe.library.probe_capture, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(thread), None, entry, None) == 0
    assert libc.pthread_join(thread, ctypes.byref(result)) == 0
    assert (result.value or 0) & 0xFFFFFFFF == 0, result.value
    check()


def case_fork(check):
    check()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check.probe.library.probe_reset()
            assert check.probe.count("stacks") == 0
            check()
            assert check.probe.count("again") == 0
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check()


def case_sub_interpreters(check):
    """From 3.12 on the thread-specific thread state follows the interpreter; before, it stays the main one's."""
    if sys.version_info < (3, 12):
        return
    try:
        import _interpreters as interpreters
        interpreter = interpreters.create("legacy")
    except ImportError:
        import _xxsubinterpreters as interpreters
        interpreter = interpreters.create(isolated=False)
    check()
    program = (
        "import sys\n"
        "sys.path[:] = %r\n"
        "from probe import Checker, Probe\n"
        "check = Checker(Probe(%r))\n"
        "def down(n):\n"
        "    if n:\n"
        "        return down(n - 1)\n"
        "    check()\n"
        "down(5)\n"
        "down(2)\n" % (sys.path, check.released))
    problem = interpreters.run_string(interpreter, program)
    assert problem is None, problem.formatted
    check()
    interpreters.destroy(interpreter)
    check()


def case_end_of_the_interpreter(check):
    """Hooks run until the process ends: in finalizers, in other threads, and after Python is finalized."""
    program = """
import atexit, ctypes, sys, threading
sys.path[:] = %r
from probe import Probe
probe = Probe(%r)
assert probe.capture()
def endless():
    while True:
        probe.capture()
for _ in range(3):
    threading.Thread(target=endless, daemon=True).start()
class Last:
    def __init__(self):
        self.capture = probe.capture
    def __del__(self):
        self.capture()
sys.last = Last()
keep = Last()
atexit.register(probe.capture)
ctypes.CDLL(None).__cxa_atexit(ctypes.cast(probe.library.probe_capture, ctypes.c_void_p), None, None)
print("done")
""" % (sys.path, check.released)
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert (done.returncode, done.stdout) == (0, b"done\n"), done


def case_memory_given_back(check):
    check()
    check.probe.library.probe_release()
    check()


def case_same_stack_same_number(check):
    numbers = set()
    for _ in range(50):
        check()
        numbers.add(check.last)
    assert len(numbers) == 1, numbers


def case_no_definition_twice(check):
    check()
    assert check.probe.count("again") == 0


def case_nothing_lost(check):
    for name in check.probe.LOSSES:
        assert check.probe.count(name) == 0, (name, check.probe.count(name))
