"""Run by embed.c: allocates from its own functions and prints the frames as Python reports them."""
import embedding
import sys


def say(size):
    frame, lines = sys._getframe(1), []
    while frame:
        lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    print(size, " ".join(lines), flush=True)


def leaf(size):
    embedding.allocate(size); say(size)


def branch(size):
    leaf(size)
    leaf(size + 1)


for number in range(2):
    branch(0x100000 + 16 * number)
