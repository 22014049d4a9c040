"""Uses memory on a GPU and does what a line of stdin asks for, with the C functions of helper.c (the first argument).

    call NAME       calls a C function and prints its result
    thread NAME     calls it in a thread of Python
    join            waits for that thread and prints the result of the call
    forks           forks children from Python, and prints how many have failed
    step            allocates and frees memory
    trap MODE       blocks, ignores or handles SIGTRAP, and prints how often it was handled
    signals         prints the signals that the threads block, and those that the process ignores and handles
    longest         prints the longest time between two turns of the loop since the last such line, in milliseconds
    stop            ends

The second argument is the time that it waits for a line, in seconds. Between two lines it runs Python.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time

import torch

helper = ctypes.CDLL(sys.argv[1])
pause = float(sys.argv[2])
blocks = [torch.empty(1000, device="cuda")]
traps = []
results = []


def forks():
    """Children whose Python code runs 20 ms after the fork."""
    failed = 0
    for _ in range(15):
        child = os.fork()
        if child == 0:
            os._exit(0 if sum(range(100)) == 4950 else 1)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


def signals():
    found = []
    for thread in sorted(os.listdir("/proc/self/task"), key=int):
        with open(f"/proc/self/task/{thread}/status") as status:
            found += [line.strip() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    return found


def trap(mode):
    if mode == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTRAP])
    elif mode == "ignore":
        signal.signal(signal.SIGTRAP, signal.SIG_IGN)
    elif mode == "handle":
        signal.signal(signal.SIGTRAP, lambda number, frame: traps.append(number))
    return len(traps)


def run(name):
    results.append(getattr(helper, name)())


longest = 0
last = time.perf_counter()
print("ready", flush=True)
while True:
    has_line = select.select([sys.stdin], [], [], pause)[0]
    now = time.perf_counter()
    longest, last = max(longest, now - last), now
    if not has_line:
        continue
    words = sys.stdin.readline().split()
    if words[0] == "call":
        arguments = [ctypes.pythonapi.PyCallable_Check] if words[1] == "start_forking" else []
        print(getattr(helper, words[1])(*arguments), flush=True)
    elif words[0] == "thread":
        thread = threading.Thread(target=run, args=[words[1]])
        thread.start()
        print("started", flush=True)
    elif words[0] == "join":
        thread.join()
        print(results.pop(), flush=True)
    elif words[0] == "forks":
        print(forks(), flush=True)
    elif words[0] == "step":
        blocks.append(torch.empty(2000, device="cuda"))
        del blocks[0]
        print("stepped", flush=True)
    elif words[0] == "trap":
        print(trap(words[1]), flush=True)
    elif words[0] == "signals":
        print(signals(), flush=True)
    elif words[0] == "longest":
        print(int(longest * 1000), flush=True)
        longest = 0
    else:
        print("stopped", flush=True)
        break
