"""Lines of the program where values that nothing computes decided a size, for the report of the dry run."""

import json
import os

from . import exceptions

# The most lines that are written. A program has few.
MAX_LINES = 256

# By (file, line, operator).
lines = {}
template = os.environ.get("SIMCUDA_GUESSES")


def note(operator, chosen, total, is_assumed):
    """Notes that a line of the program selected `chosen` of at most `total` elements.

    `is_assumed` is true if a policy decided that, and false if random numbers did, which are others on a GPU.
    """
    place = exceptions.line_of_program()
    if not template or place is None:
        return
    found = lines.get((*place, operator))
    if found is None:
        if len(lines) >= MAX_LINES:
            return
        found = lines[(*place, operator)] = {"location": "%s:%d" % place, "operator": operator, "times": 0, "selected": 0, "total": 0,
                                             "is_assumed": False}
    found["times"] += 1
    found["is_assumed"] |= is_assumed
    # Those of the largest one.
    if total > found["total"] or total == found["total"] and chosen > found["selected"]:
        found.update(selected=chosen, total=total)
    # A process can end without notice. Few of many calls write.
    if found["times"] & (found["times"] - 1) == 0:
        write()


def write():
    """Writes all lines into the file of this process."""
    path = template.replace("%p", str(os.getpid()))
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(list(lines.values()), file)
    os.replace(path + ".new", path)
