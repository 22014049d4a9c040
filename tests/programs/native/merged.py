"""`merged.py LIBCUDART OUT`: allocates from Python called by C called by Python.

Writes a line of JSON to OUT for each allocation: its size, the stack from `traceback`, outermost first, and the C
functions between its frames: [[index of the caller, [one of these names, ...]], ...].
"""
import ctypes
import functools
import json
import re
import sys
import threading
import traceback

runtime = ctypes.CDLL(sys.argv[1])
out = open(sys.argv[2], "w")
last_size = 1 << 20
# The C functions that call a Python function, by its code object. Empty where Python calls it itself, as from 3.11 on.
THROUGH = {}


def through(*names):
    """Declares that C calls the decorated function through one of these functions of the interpreter."""
    def mark(function):
        THROUGH[function.__code__] = names
        return function
    return mark


direct = through() if sys.version_info >= (3, 11) else lambda function: function


def note(size):
    frame, between = sys._getframe(1), []
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    for index, code in enumerate(codes):
        if code in THROUGH:
            between.append([index - 1, THROUGH[code]])
    frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_stack()[:-1]]
    out.write(json.dumps({"size": size, "frames": frames, "between": between}) + "\n")


def allocate(*_):
    global last_size
    last_size += 1
    pointer = ctypes.c_void_p()
    # Both calls are on one line, so both stacks have the same line number.
    _ = note(last_size), runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(last_size))
    return _[1]


def case_plain():
    @direct
    def inner():
        return allocate()

    @direct
    def outer():
        return inner()
    return outer()


def case_map():
    @through("map_next")
    def called(n):
        return allocate()
    return sum(map(called, range(2)))


def case_sorted():
    @through("list_sort_impl", "list_sort")
    def key(n):
        allocate()
        return n
    sorted([2, 1], key=key)


def case_reduce():
    @through("functools_reduce")
    def add(a, b):
        return allocate() + a + b
    functools.reduce(add, [0, 0, 0])


def case_partial():
    @through("partial_call", "partial_vectorcall")
    def called(a, b):
        return allocate()
    functools.partial(called, 1)(2)


def case_regular_expression():
    @through("pattern_subx")
    def replaced(match):
        allocate()
        return "b"
    re.compile("a").sub(replaced, "xaya")


def case_generator():
    def numbers():
        yield allocate()
        yield allocate()

    def delegating():
        yield from numbers()
        yield allocate()
    for _ in delegating():
        pass
    sum(delegating())


def case_generators_in_c():
    @through("gen_iternext", "gen_send_ex", "gen_send_ex2")
    def numbers(n):
        for _ in range(n):
            yield allocate()
    list(numbers(2))
    next(numbers(1))


def case_class_with_call():
    class Callable:
        def __call__(self, n):
            return allocate()
    Callable()(1)
    list(map(Callable(), [1]))


def case_constructor_and_attributes():
    class Made:
        def __init__(self):
            self.value = allocate()

        def __getattr__(self, name):
            return allocate()

        @property
        def computed(self):
            return allocate()

        def __add__(self, other):
            return allocate()

        def __del__(self):
            allocate()
    made = Made()
    made.missing
    made.computed
    made + 1
    del made


def case_decorator():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            allocate()
            return function(*args)
        return wrapper

    @decorate
    @decorate
    def decorated(n):
        return allocate()
    decorated(1)


def case_cached():
    @functools.lru_cache(maxsize=None)
    def cached(n):
        return allocate()
    cached(1)


def case_recursion_across_c():
    def down(n):
        if n == 0:
            return allocate()
        if n % 3 == 0:
            return down(n - 1)
        if n % 3 == 1:
            return list(map(down, [n - 1]))
        return functools.reduce(lambda _, m: down(m), [0, n - 1])
    for depth in (1, 30, 29, 31, 31, 5):
        down(depth)


def case_foreign_callback():
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    numbers = (ctypes.c_int * 3)(3, 1, 2)

    def compare(a, b):
        return allocate()
    ctypes.CDLL(None).qsort(numbers, ctypes.c_size_t(3), ctypes.c_size_t(4), kind(compare))


def case_exec_and_comprehensions():
    exec("allocate()", {"allocate": allocate})
    [allocate() for _ in range(2)]
    {n: allocate() for n in range(2)}
    list(allocate() for _ in range(2))


def case_thread():
    thread = threading.Thread(target=case_map)
    thread.start()
    thread.join()


def case_exception():
    try:
        list(map(lambda n: 1 // n, [0]))
    except ZeroDivisionError:
        allocate()
    allocate()


for name, case in sorted(globals().items()):
    if name.startswith("case_"):
        for _ in range(2):
            case()
out.close()
print("done")
